"""What trainer.py trains on: a tiny Qwen3 that plays two games well enough to be measured.

`guess` takes six turns, each with a call of a tool; `count` is one reply. Both are drawn from a task's number, and both
trainers play them with the same words, tools and limits. The model is warmed up here on how a player would write, until
nearly every reply of `guess` is a well-formed call: an untrained one would end each episode with its first turn.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.utils import get_json_schema

from swarm_engine.config import Merge
from swarm_engine.merger import merge
from swarm_engine.models.decoder import Decoder, DecoderConfig
from swarm_engine.models.loading import LoadedPolicy, save_policy
from swarm_engine.seeding import derive_seed
from swarm_engine.tracker.answers import Answer
from swarm_engine.tracker.codec import ChatCodec
from swarm_engine.tracker.messages import Message, Tool
from swarm_engine.tracker.tracker import Draft, EpisodeTracker
from swarm_engine.trainer.cloning import ClonedText, Recipe, clone, randomize
from swarm_engine.types import FinishReason

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Qwen3's tokens that are added and not flagged special."""
END_ID = SPECIAL.index("<|im_end|>")
VOCAB_SIZE = 4096
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "eos_token_id": END_ID,
    "dtype": "float32",
}
HIGHEST = 100
NUM_TURNS = 6
LONGEST_COUNT = 40
WARM_UP = Recipe(num_updates=150, batch_size=4, num_warmup_updates=10, context_weight=0.0)
NUM_TAUGHT = {"guess": 640, "count": 320}
"""Conversations to be cloned, at most."""


class Guess:
    """A number is to be guessed, and then another. A TRL environment: its one tool is the method `guess`."""

    def reset(self, task: int, **_: Any) -> None:
        """Begin."""
        self._draw = random.Random(f"guess/{task}")
        self._number = self._draw.randint(1, HIGHEST)

    # No type of what it returns: transformers would write that into the schema, where OpenAI's has no place for it.
    def guess(self, number: int):
        """
        Guess the number.

        Args:
            number: Your guess, from 1 to 100.
        """
        if number == self._number:
            self._number = self._draw.randint(1, HIGHEST)
            return f"{number} is right. Now guess another number from 1 to {HIGHEST}."
        return f"The number is {'higher' if number < self._number else 'lower'} than {number}."


@dataclass(frozen=True, slots=True)
class Game:
    """One kind of episode."""

    name: str
    num_turns: int
    max_tokens: int
    """Of a reply."""
    question: Callable[[int], str]
    """The first message of a task."""
    tools: tuple[Tool, ...] = ()

    def opening(self, task: int) -> list[Message]:
        """The messages that an episode begins with."""
        return [{"role": "user", "content": self.question(task)}]


def counted(task: int) -> tuple[int, int]:
    """First and last number to be counted."""
    draw = random.Random(f"count/{task}")
    first = draw.randint(1, HIGHEST - LONGEST_COUNT)
    return first, first + draw.randint(LONGEST_COUNT // 4, LONGEST_COUNT - 1)


GUESS = Game(
    "guess",
    NUM_TURNS,
    48,
    lambda _: f"I think of a number from 1 to {HIGHEST}. Guess it, and go on when I have another one.",
    # A bound method, as TRL has it: so both trainers render the same prompt.
    (get_json_schema(Guess().guess),),
)
COUNT = Game("count", 1, 96, lambda task: "Count from {} to {}.".format(*counted(task)))


def call_tool(game: Guess, name: str, arguments: str) -> str:
    """What a tool call gets back, its errors in TRL's words."""
    try:
        assert name == "guess", f"Tool {name} not found."
        return str(game.guess(**json.loads(arguments)))
    except (TypeError, ValueError, AssertionError) as error:
        return str({"error": str(error)})


# An episode, whoever answers


class Player:
    """One episode of a game: what is asked next, given what was answered."""

    def __init__(self, game: Game, task: int, name: str, codec: ChatCodec) -> None:
        self.game = game
        self.tracker = EpisodeTracker(name, "policy", codec)
        self.num_calls = 0
        """Tool calls that were carried out."""
        self._codec = codec
        self._messages = game.opening(task)
        self._turn = 0
        self._environment = Guess()
        self._environment.reset(task)

    def ask(self) -> Draft:
        """The next request."""
        (draft,) = self.tracker.begin("main", self._messages, self.game.tools)
        return draft

    def take(
        self, draft: Draft, ids: Sequence[int], logprobs: Sequence[float], version: int, ended: FinishReason
    ) -> bool:
        """Take the reply; returns whether the episode goes on."""
        reader = self._codec.reader(draft)
        reader.push(ids)
        reader.finish()
        answer: Answer = reader.answer
        self.tracker.finish(
            draft,
            completion_ids=ids,
            logprobs=logprobs,
            policy_versions=[version] * len(ids),
            temperature=1.0,
            finish_reason=ended,
            answer=answer,
        )
        self._turn += 1
        if self._turn == self.game.num_turns or not answer.tool_calls:
            return False
        self._messages.append(answer.message())
        for call in answer.tool_calls:
            result = call_tool(self._environment, call.name, call.arguments)
            self.num_calls += 1
            self._messages.append({"role": "tool", "content": result, "tool_call_id": call.call_id})
        return True


# The model


def build_model(folder: Path, template: str, recipe: Recipe = WARM_UP, seed: int = 0) -> None:
    """Write a warmed-up model with this chat template as a Hugging Face folder."""
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as written:
        source = Path(written)
        build_tokenizer().save(str(source / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
        }
        (source / "tokenizer_config.json").write_text(json.dumps(config))
        (source / "chat_template.jinja").write_text(template, encoding="utf-8")
        codec = load_codec(source)
        draw = random.Random(derive_seed("warm-up", seed))
        games = (GUESS, COUNT)
        most = recipe.num_updates * recipe.batch_size  # more are not looked at
        samples = [
            taught(game, number, codec, draw) for game in games for number in range(min(most, NUM_TAUGHT[game.name]))
        ]
        model = Decoder(DecoderConfig.from_json(MODEL))
        randomize(model, seed)
        clone(model, samples, recipe, seed)
        folder.mkdir(parents=True)
        save_policy(LoadedPolicy(model, MODEL, source, (END_ID,)), folder)


def load_codec(folder: Path) -> ChatCodec:
    """The codec of a model's folder."""
    return ChatCodec.load(folder, (END_ID,), datetime(2026, 1, 1, tzinfo=UTC))


def build_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of the English that Python ships, with Qwen3's control tokens.

    Calls are among its texts too: as Qwen3's it has two closing braces as one token, or the model had to count them.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKERS),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*topics.values(), *map(guess_text, range(1, 2 * HIGHEST))], trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    return tokenizer


def guess_text(number: int) -> str:
    """A reply that guesses, as the chat template would write it."""
    call = json.dumps({"name": "guess", "arguments": {"number": number}})
    return f"<tool_call>\n{call}\n</tool_call>"


def taught(game: Game, task: int, codec: ChatCodec, draw: random.Random) -> ClonedText:
    """An episode as somebody who knows how would play it: in `guess` half the time by bisection."""
    player = Player(game, -task - 1, f"taught-{task}", codec)
    low, high = 1, HIGHEST
    goes_on = True
    while goes_on:
        draft = player.ask()
        if game is GUESS:
            number = (low + high) // 2 if draw.random() < 0.5 else draw.randint(1, HIGHEST)
            text = guess_text(number)
        else:
            first, last = counted(-task - 1)
            text = " ".join(map(str, range(first, last + 1)))
        ids = (*codec.encode(text), END_ID)
        goes_on = player.take(draft, ids, [0.0] * len(ids), 0, FinishReason.STOP)
    (timeline,) = merge([call.timeline() for call in player.tracker.calls()], Merge.TOKEN)
    return ClonedText(timeline.tokens, timeline.loss_mask)
