"""Build the embedded model: tokenizer, chat template, config, and start weights for every built-in game.

    python scripts/build_nano.py                    all of it, about 10 minutes on 2 cores
    python scripts/build_nano.py --games spy        one game's weights again, on the tokenizer that is there

Everything comes from the games' own engines and the seeds below, so building twice on one machine gives the same
files. The games are of the build deck, which shares no game with training or with the held-out ones (`vibe.seeds`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from swarm_engine.models import NANO_DIR
from vibe import library, warmup

VOCAB_SIZE = 896
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_CONTEXT = 1024

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 96,
    "intermediate_size": 288,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "max_position_embeddings": MAX_CONTEXT,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": SPECIALS.index("<|im_end|>"),
    "pad_token_id": SPECIALS.index("<|endoftext|>"),
    "dtype": "bfloat16",
}

CORPUS_RULES: dict[str, list[dict[str, int]]] = {
    "tictactoe": [{}, {"size": 4}],
    "spy": [{}, {"players": 6, "rounds": 2}],
    "gridwalk": [{}, {"size": 5, "holes": 4, "moves": 12}],
    "nim": [{}, {"stones": 40, "max_take": 5}],
}
"""Rules whose games the tokenizer is trained on, so that their numbers are whole tokens too."""
NUM_CORPUS_GAMES = 300

ENGLISH = """
the a an of to and in is it you that he she was for on are with as they be at one have this from or had by word but
not what all were we when your can said there use each which do how their if will up other about out many then them
these so some her would make like him into time has look two more write go see number no way could people my than
first been call who its now find long down day did get come made may part over new sound take only little work know
place year live me back give most very after thing our just name good sentence man think say great where help through
much before line right too mean old any same tell boy follow came want show also around form three small set put end
does another well large must big even such because turn here why ask went men read need land different home us move
try kind hand picture again change off play spell air away animal house point page letter mother answer found study
still learn should world high every near add food between own below country plant last school father keep tree never
start city earth eye light thought head under story saw left few while along might close something seem next hard open
example begin life always those both paper together got group often run important until children side feet car mile
night walk white sea began grow took river four carry state once book hear stop without second later miss idea enough
eat face watch far really almost let above girl sometimes mountain cut young talk soon list song being leave family
it's row column board card deck hand deal draw bet bid offer price trade buy sell gold coin score lose win game player
turn round rule legal
"""


def main() -> int:
    """Parse, build, write the card."""
    parser = argparse.ArgumentParser(description="Build the embedded model.")
    parser.add_argument(
        "--games", nargs="*", choices=library.names(), help="only these, on the tokenizer that is there"
    )
    parser.add_argument("--out", type=Path, default=NANO_DIR)
    args = parser.parse_args()
    torch.set_num_threads(1)  # small matrices: a second thread costs more than it gives
    (args.out / "weights").mkdir(parents=True, exist_ok=True)
    if not args.games:
        write_tokenizer(args.out)
    for game in args.games or library.names():
        started = time.monotonic()
        template = library.load(game)
        (plan,) = warmup.plans(template)
        policy, card = asyncio.run(
            warmup.build(template, template.defaults, plan, nano=args.out, tell=lambda line: print(line, flush=True))
        )
        tensors = {name: view.to(torch.bfloat16).contiguous() for name, view in policy.model.named_weights()}
        path = args.out / "weights" / f"{game}.safetensors"
        save_file(tensors, path, metadata={"format": "pt", "card": card.to_json()})
        path.chmod(0o644)
        print(f"{game}: built in {(time.monotonic() - started) / 60:.1f} minutes", flush=True)
    (args.out / "CARD.md").write_text(card_page(args.out), encoding="utf-8")
    return 0


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer of the games' own texts and some English, with its config and chat template.

    Punctuation stands alone, so that the cells of a board and the items of a list are the same tokens as the replies.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation("isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(text, special=True) for text in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": MAX_CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    config = CONFIG | {"vocab_size": tokenizer.get_vocab_size()}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def corpus() -> Iterator[str]:
    """Messages of played games, each with its role, then English words."""
    for game, variants in CORPUS_RULES.items():
        template = library.load(game)
        for changes in variants:
            played = asyncio.run(
                warmup.demonstrations(
                    template, template.rules(**changes), share=0.5, num_episodes=NUM_CORPUS_GAMES, seed=1
                )
            )
            yield from (f"{message['role']}\n{message['content']}" for talk in played for message in talk)
    yield ENGLISH
    yield from ENGLISH.split()


def card_page(folder: Path) -> str:
    """The model card, from what every weights file says about itself."""
    cards: list[warmup.Card] = []
    for path in sorted((folder / "weights").glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            cards.append(warmup.Card.from_json(file.metadata()["card"]))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "CARD.md")
    rows = "\n".join(
        f"| {card.game} | {card.plan.share:.0%} | {card.num_conversations:,} "
        f"| {card.plan.num_updates:,} | {card.minutes:.1f} "
        f"| {level(card.random)} | {level(card.scripted)} | {level(card.sampled)} | {level(card.greedy)} "
        f"| {card.share_with_variance:.0%} |"
        for card in cards
    )
    return PAGE.format(
        header=HEADER, rows=rows, vocab=config["vocab_size"], megabytes=size / 1e6, games=cards[0].random.num_games
    )


def level(one: warmup.Level) -> str:
    """A mean with its standard error."""
    return f"{one.mean:.3f} ± {one.se:.3f}"


HEADER = (
    "| game | share scripted | conversations | updates | minutes | random legal play | script "
    "| nano, temperature 1 | nano, greedy | groups with different rewards |\n|---|---|---|---|---|---|---|---|---|---|"
)

PAGE = """# nano

Start weights for the built-in games, small enough to ship with the package and to train on a laptop's processor. Each
file under `weights/` is a policy for one game under its default rules; all share one architecture (Qwen3, hidden 96, 3
layers, 3 heads of 32, MLP 288, tied embeddings, vocabulary {vocab}) and one tokenizer. Together {megabytes:.2f} MB, in
bfloat16.

They are not language models: outside their game they say nothing of use.

## What they were made of

`scripts/build_nano.py` builds everything from fixed seeds. The games are played by their own engines; each reply of a
trained seat is a random legal one or, at the stated share, what the game's honest, weak script says. No reply was
written by hand, and none was chosen by its reward. Only games of the build deck are used: training and held-out games
come from other decks.

{header}
{rows}

Levels are mean rewards ± standard errors over {games} games of the build deck, per game the mean over the trained
agents. The rewards' ranges are in each game's `rewards.py`. Minutes are wall time of the machine that built them.
"""


if __name__ == "__main__":
    sys.exit(main())
