"""The APIs that the endpoint speaks, by route. `protocol` says what each of them must be able to do."""

from collections.abc import Mapping

from swarm_engine.server.dialects import chat, completions, messages, responses
from swarm_engine.server.dialects.protocol import Dialect

DIALECTS: Mapping[str, Dialect] = {
    "chat/completions": Dialect(chat.parse),
    "completions": Dialect(completions.parse),
    "responses": Dialect(responses.parse),
    "messages": Dialect(messages.parse),
}
