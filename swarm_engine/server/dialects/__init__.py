"""The APIs that the endpoint speaks, by route. `protocol` says what each of them must be able to do."""

from collections.abc import Mapping

from swarm_engine.server.dialects import chat, completions, messages, responses
from swarm_engine.server.dialects.protocol import Dialect
from swarm_engine.server.dialects.writing import openai_error

DIALECTS: Mapping[str, Dialect] = {
    "chat/completions": Dialect(chat.parse, openai_error),
    "completions": Dialect(completions.parse, openai_error),
    "responses": Dialect(responses.parse, openai_error),
    "messages": Dialect(messages.parse, messages.error_body),
}
