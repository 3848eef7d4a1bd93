"""Make a Llama with random weights and a tokenizer of six words, without a download."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["<pad>", "<eos>", "one", "two", "three", "four"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=len(WORDS),
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)
