"""Make the tiny target that is shipped in inputs/target.

    python inputs/make_target.py

A byte-level BPE tokenizer is trained on inputs/data/conversations.jsonl, and a six-layer Qwen3 is trained on the
same conversations for less than a minute, so that its hidden states mean something. The result is small enough for git
and goes through the same code as a real target: a chat template with generation markers, a pad token that is
neither 0 nor the end token, separate input and output embeddings, more rows in them than the tokenizer has tokens.

Seeded and on one thread: on one machine two runs write the same bytes. Another CPU or another version of torch
may move the last bits of the weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from tokenizers import AddedToken, Tokenizer, models, trainers
from tokenizers.pre_tokenizers import ByteLevel
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM

if TYPE_CHECKING:
    from collections.abc import Iterator

INPUTS: Final = Path(__file__).resolve().parent

END: Final = "<|im_end|>"
ADDED_TOKENS: Final = (
    AddedToken("<|endoftext|>", special=True, normalized=False),
    AddedToken("<|im_start|>", special=True, normalized=False),
    AddedToken(END, special=True, normalized=False),
    # Text rather than control: they stay when a reader decodes without special tokens.
    AddedToken("<think>", special=False, normalized=False),
    AddedToken("</think>", special=False, normalized=False),
)
TOKENS: Final = 1000  # merged, single-byte and added ones together
EMBEDDING_ROWS: Final = 1024  # TOKENS rounded up to a multiple of 64
MAX_POSITIONS: Final = 2048

BATCH: Final = 8
PIECE: Final = 256  # tokens; longer conversations are cut into pieces of this size for training
IGNORED: Final = -100  # the label that the loss of transformers leaves out

CHAT_TEMPLATE: Final = """\
{#- ChatML. Tools first (joined to a leading system message), then one block a message. What the model itself writes,
    its end marker included, stands between generation markers: that is what a draft is supervised on. -#}
{%- set leading_system = messages[0].content if messages and messages[0].role == 'system' else '' -%}
{%- if tools %}
    {{- '<|im_start|>system\\n' + (leading_system + '\\n\\n' if leading_system else '') }}
    {{- 'You can call these functions, described by one JSON object a line:\\n<tools>\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- '</tools>\\nTo call one, write a JSON object with "name" and "arguments" ' }}
    {{- 'between <tool_call> and </tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' -}}
        {% generation %}
            {%- if message.reasoning_content %}
                {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
            {%- endif %}
            {{- message.content or '' }}
            {%- for call in message.tool_calls or [] %}
                {{- '\\n' if message.content or not loop.first else '' }}
                {{- '<tool_call>\\n{"name": ' + call.function.name | tojson + ', "arguments": ' }}
                {%- if call.function.arguments is string %}
                    {{- call.function.arguments }}
                {%- else %}
                    {{- call.function.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' -}}
        {% endgeneration %}
        {{- '\\n' }}
    {%- elif not (loop.first and tools and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def read_conversations(path: Path) -> list[list[dict[str, Any]]]:
    """Return the messages of every row of a JSONL file, in its order."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line)["messages"] for line in lines]


def texts(conversations: list[list[dict[str, Any]]]) -> Iterator[str]:
    """Yield every piece of text in the conversations, reasoning and tool arguments included."""
    for message in (message for messages in conversations for message in messages):
        yield message["role"]
        yield message["content"]
        yield message.get("reasoning_content", "")
        yield from (json.dumps(call["function"]) for call in message.get("tool_calls", []))


def make_tokenizer(conversations: list[list[dict[str, Any]]]) -> Qwen2Tokenizer:
    """Train a tokenizer that cuts text as Qwen's does; the added tokens get the highest ids."""
    qwen = Qwen2Tokenizer().backend_tokenizer
    trained = Tokenizer(models.BPE())
    trained.normalizer, trained.pre_tokenizer = qwen.normalizer, qwen.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS - len(ADDED_TOKENS),
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator(texts(conversations), trainer)
    model = json.loads(trained.to_str())["model"]
    merges: Any = [tuple(merge) for merge in model["merges"]]
    # Without arguments of its own the pad token is already <|endoftext|>, and the end token too until it is set.
    tokenizer = Qwen2Tokenizer(vocab=model["vocab"], merges=merges, model_max_length=MAX_POSITIONS)
    tokenizer.add_tokens(list(ADDED_TOKENS))
    tokenizer.eos_token = END
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: Qwen2Tokenizer) -> Qwen3ForCausalLM:
    """Return an untrained target; its weights come from torch's global generator."""
    config = Qwen3Config(
        vocab_size=EMBEDDING_ROWS,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.1,  # at this width the usual 0.02 learns slowly and keeps the layers alike
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    return Qwen3ForCausalLM(config)


def collate(samples: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels [B, S], padded on the right; S is the longest sample of the batch."""
    rows = [torch.tensor(sample) for sample in samples]
    # Attention is causal, so no real token sees a pad: any id will do, and no attention mask is needed.
    ids = pad_sequence(rows, batch_first=True)
    return ids, pad_sequence(rows, batch_first=True, padding_value=IGNORED)


def mean_loss(model: Qwen3ForCausalLM, samples: list[list[int]]) -> float:
    """Return the next-token loss in nats, averaged over the samples."""
    with torch.inference_mode():
        batches = [torch.tensor([sample]) for sample in samples]
        losses: list[float] = [model(input_ids=ids, labels=ids).loss.item() for ids in batches]
    return sum(losses) / len(losses)


def train(model: Qwen3ForCausalLM, samples: list[list[int]], steps: int) -> None:
    """Train on every token, in seeded random order; the learning rate falls linearly to zero."""
    pieces = [sample[i : i + PIECE] for sample in samples for i in range(0, len(sample), PIECE)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for _ in range(steps):
        batch = torch.randperm(len(pieces))[:BATCH].tolist()
        ids, labels = collate([pieces[i] for i in batch])
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def save(model: Qwen3ForCausalLM, tokenizer: Qwen2Tokenizer, out: Path) -> None:
    """Write the folder that `from_pretrained` reads; other files in it stay."""
    out.mkdir(parents=True, exist_ok=True)
    written = [Path(name) for name in tokenizer.save_pretrained(out)]
    model.save_pretrained(out)
    names = ("config.json", "generation_config.json", "model.safetensors")
    for path in [*written, *(out / name for name in names)]:
        path.chmod(0o644)


def parse_arguments() -> argparse.Namespace:
    """Return the command line; the defaults are the repository's own folders."""
    parser = argparse.ArgumentParser(description="Make the tiny target of inputs/target.")
    parser.add_argument("--data", type=Path, default=INPUTS / "data" / "conversations.jsonl")
    parser.add_argument("--out", type=Path, default=INPUTS / "target")
    parser.add_argument("--steps", type=int, default=240, help="training steps")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train tokenizer and model, report the loss before and after, write the folder."""
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    conversations = read_conversations(arguments.data)
    tokenizer = make_tokenizer(conversations)
    model = make_model(tokenizer)
    samples = cast("list[list[int]]", tokenizer.apply_chat_template(conversations, return_dict=False))
    print(f"{len(samples)} conversations, {sum(map(len, samples))} tokens, vocabulary of {len(tokenizer)}")
    print(f"loss before training: {mean_loss(model, samples):.3f}")
    train(model, samples, arguments.steps)
    print(f"loss after {arguments.steps} steps: {mean_loss(model, samples):.3f}")
    save(model, tokenizer, arguments.out)


if __name__ == "__main__":
    main()
