# SPDX-License-Identifier: Apache-2.0
"""Write a stand-in for the language model, which preflight checks while the model itself is not made yet.

The config is the model's own. The tokenizer makes a token of every byte, so the model's own tokenizer never makes more
tokens of a prompt. Words that are never used fill the rest of the vocabulary. The weight files have headers only.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from recipe.bapo.language_model.source import CHAT_TEMPLATE, CONFIG, END, PADDING, START
from recipe.bapo.run.preflight.headers import write_headers


def write_shape(folder: Path, vocabulary: int | None = None) -> None:
    """Write a folder with the language model's config, a stand-in for its tokenizer, and no weights.

    Args:
        folder: where to write; it must not exist.
        vocabulary: number of tokens, at least 259. None: as many as the language model has.
    """
    folder.mkdir(parents=True)
    config = json.loads(CONFIG.read_text())
    config |= {"vocab_size": vocabulary or config["vocab_size"]}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    words = [PADDING, START, END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<unused{number}>" for number in range(config["vocab_size"] - len(words))]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PADDING, END])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": END, "pad_token": PADDING, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    write_headers(folder)
