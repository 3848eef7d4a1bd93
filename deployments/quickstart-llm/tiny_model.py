"""Create the model of the quickstart: a Llama of some 100,000 weights that reads and writes bytes.

    python tiny_model.py --out FOLDER

Nothing is downloaded. The folder gets the files that vLLM and transformers load: the configuration,
random weights, and a tokenizer with one token for each byte. A complete folder stays unchanged, so
that every attempt of a run begins with the same weights.

Exit status: 0 if the model exists; 2 if the arguments are wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

#: Number of tokens that stand for a byte: token 65 stands for the byte 65, and so on.
BYTES = 256
#: The token that ends a text.
END = BYTES
#: Number of tokens in the vocabulary.
VOCABULARY = BYTES + 1
#: Largest number of tokens of a prompt and its answer together.
MAX_TOKENS = 128


def make_model(folder: Path, *, seed: int) -> None:
    """Create a model in an empty or missing folder. Do nothing if the folder contains a model.

    Args:
        folder: The folder.
        seed: Seed of the random weights. Equal seeds give equal weights.
    """
    if (folder / "config.json").exists():
        return
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        # vLLM's attention on a CPU requires a head size of at least 32.
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    LlamaForCausalLM(config).save_pretrained(draft)
    byte_tokenizer().save_pretrained(draft)
    # Rename the temporary folder only after all files were written. So a folder with the final name
    # is always complete.
    os.replace(draft, folder)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are the bytes of a text in UTF-8."""
    vocabulary = {letter: byte for byte, letter in enumerate(_letters())}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, "<end>": END}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<end>",
        pad_token="<end>",
        model_max_length=MAX_TOKENS,
    )


def _letters() -> list[str]:
    """Return the characters with which a byte-level tokenizer represents the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(BYTES, 2 * BYTES))
    return [chr(byte if byte in printable else next(others)) for byte in range(BYTES)]


def main(argv: Sequence[str] | None = None) -> int:
    """Create the model, and return the exit status."""
    parser = argparse.ArgumentParser(description="Make the model of the quickstart.")
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        required=True,
        help="Folder of the model. If the folder already has a complete model, nothing is changed",
    )
    add("--seed", type=int, default=0, help="Seed of the weights")
    options = parser.parse_args(argv)
    transformers.logging.disable_progress_bar()
    make_model(options.out, seed=options.seed)
    print(f"the model is at {options.out}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
