"""A chat model small enough for tests: random weights, byte-level tokens, a ChatML template with tools.

It is a normal Hugging Face folder, so everything that loads a real model loads this one. One token is one byte of
UTF-8, so every string encodes to itself and back, and token counts in tests can be read off the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# The shape of Qwen2.5's template: a tools block in the system message, calls as <tool_call>, results as a user turn.
CHAT_TEMPLATE = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role != 'system' or not loop.first %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_tiny_tokenizer(folder: Path, *, texts: Sequence[str] = (), context: int = 4096) -> Any:
    """Write a byte-level tokenizer with a chat template to ``folder``; see `make_tiny_model`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    bytes_only.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    if texts:
        trainer = trainers.BpeTrainer(vocab_size=2048, initial_alphabet=sorted(vocabulary), show_progress=False)
        bytes_only.train_from_iterator((word for text in texts for word in text.split(" ")), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_tiny_model(
    folder: str | Path,
    *,
    arch: Literal["llama", "qwen2"] = "llama",
    layers: int = 2,
    heads: int = 4,
    seed: int = 0,
    texts: Sequence[str] = (),
    context: int = 4096,
) -> Path:
    """Write a random model, its tokenizer, chat template and generation config to ``folder`` and return the folder.

    Both use grouped-query attention (two heads on one). ``llama`` ties embeddings and head, ``qwen2`` has biases instead.
    ``texts``: to train a tokenizer on, for long prompts; without them, a token is a byte. ``context``: most tokens of a sequence.
    """
    import torch
    from transformers import (
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    folder = Path(folder)
    tokenizer = make_tiny_tokenizer(folder, texts=texts, context=context)

    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": context,
        "initializer_range": 0.1,  # larger than usual, so that random logits differ enough
        "tie_word_embeddings": arch == "llama",
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**shape)) if arch == "llama" else Qwen2ForCausalLM(Qwen2Config(**shape))
        if arch == "qwen2":  # biases start at zero, which would hide mistakes in them
            for layer in model.model.layers:
                for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                    torch.nn.init.normal_(projection.bias, std=0.1)
    model.to(torch.float32).save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)
    return folder
