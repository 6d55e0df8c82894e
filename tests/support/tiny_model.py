# SPDX-License-Identifier: Apache-2.0
"""A tiny causal language model with random weights, whose tokenizer makes a token of every byte."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipe.bapo.language_model.source import CHAT_TEMPLATE, END, PADDING, START


def write_tiny_model(folder) -> None:
    """Write a model of two layers with 259 tokens to a new folder. Its end token is token 2, its padding token 0."""
    words = [PADDING, START, END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"eos_token": END, "pad_token": PADDING, "chat_template": CHAT_TEMPLATE}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    tokens = {"vocab_size": len(words), "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tokens, tie_word_embeddings=True)).save_pretrained(folder)
