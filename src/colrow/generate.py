"""Text from a language model in a Hugging Face folder, split over ranks: `colrow generate`."""

from __future__ import annotations

import time
from typing import Any, TypedDict

import torch

from colrow import comm, source
from colrow.errors import DataError
from colrow.loop import make_mesh
from colrow.model_options import GenerateOptions
from colrow.pretrained import load_pretrained
from colrow.show import Show


class Generated(TypedDict):
    """A text in numbers, as `--json` prints it: `text` follows the prompt, and has so many `tokens`."""

    prompt: str
    text: str
    tokens: int
    tokens_per_second: float


def generate(options: GenerateOptions) -> Generated:
    """One rank's part; the default process group must be there. The first rank writes the text to stdout as it comes.

    Raises:
        DataError, CheckpointError: the folder, its tokenizer or the prompt cannot be used.
    """
    options.check()
    o, mesh, saved = options, make_mesh(options.tp), source.find_language_model(options.model)
    tokenizer = saved.tokenizer()
    ids = tokenizer(o.prompt, return_tensors="pt")["input_ids"]
    if not ids.numel():
        raise DataError("--prompt", f"{o.prompt!r} has no tokens", "a model goes on with something", "Give another one")
    saved.require_known(ids, tokenizer)
    limit, length = saved.positions, ids.shape[1]
    if limit is not None and length + o.max_new_tokens > limit:
        given = f"{o.max_new_tokens} after a prompt of {length} tokens"
        fix = "Give a shorter prompt, or fewer tokens"
        raise DataError("--max-new-tokens", given, f"the model takes {limit} in all", fix)
    model = load_pretrained(saved.path, mesh["tp"])
    torch.manual_seed(o.seed)
    speaks = comm.is_rank_zero() and not o.json
    streamer = _streamer(tokenizer) if speaks and o.beams == 1 else None
    began, ids = time.perf_counter(), ids.to(comm.device(mesh))
    made = model.generate(ids, attention_mask=torch.ones_like(ids), streamer=streamer, **_settings(o, model))[0]
    count, seconds = len(made) - length, time.perf_counter() - began
    text = tokenizer.decode(made[length:], skip_special_tokens=True)
    if speaks and streamer is None:
        print(tokenizer.decode(made, skip_special_tokens=True))
    show = Show(talks=speaks, to_stderr=True)
    show.line(f"\n{count} tokens, {count / seconds:,.1f} tokens/s on {o.tp} ranks")
    return {"prompt": o.prompt, "text": text, "tokens": count, "tokens_per_second": round(count / seconds, 1)}


def _settings(o: GenerateOptions, model: Any) -> dict[str, Any]:
    """For transformers. What the folder's generation config says of drawing does not count: the options do."""
    draws = o.temperature > 0 or o.top_p < 1
    how = {"temperature": o.temperature or 1.0, "top_p": o.top_p, "top_k": 0} if draws else {}
    if not draws:
        how = {"temperature": None, "top_p": None, "top_k": None}
    config = model.generation_config
    end = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    pad = config.pad_token_id if config.pad_token_id is not None else end
    return {"max_new_tokens": o.max_new_tokens, "num_beams": o.beams, "do_sample": draws, "pad_token_id": pad, **how}


def _streamer(tokenizer: Any) -> Any:
    return source.quiet_transformers().TextStreamer(tokenizer, skip_special_tokens=True)
