"""From a DecodeConfig to what every mode decodes with."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from eagle3.chat_template import ChatTemplate
from eagle3.config import ConfigError, DecodeConfig
from eagle3.decoding.drafter import Drafter
from eagle3.decoding.generate import make_drafter
from eagle3.decoding.request import Request
from eagle3.decoding.session import Session
from eagle3.generated import generated_target
from eagle3.interop import load_draft
from eagle3.sharding import check_shape, place_module
from eagle3.text import Tokenizer, end_ids, load_tokenizer
from gdn import HybridLM, TargetConfig, load_pretrained
from gdn.ops import native
from gdn.packing import Packer, finish
from gdn.sharding import active_mesh

log = logging.getLogger(__name__)


class Engine(NamedTuple):
    """A loaded target with all that belongs to it."""

    config: DecodeConfig  # with the draft's precision filled in
    target: HybridLM
    drafter: Drafter | None  # None decodes plainly
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]

    def session(self, drafter: Drafter | None, *, is_long: bool = False) -> Session:
        """Make a session.

        Args:
          drafter: this engine's, or None.
          is_long: it is for one text that may become long: room is made in fewer steps, as each is
            a stop to compile.
        """
        config = self.config
        room = {}
        if is_long:
            room = {"min_capacity": 1024, "growth": 4, "is_conversation": True}
        return Session(
            self.target,
            drafter,
            stream_every=config.stream_every,
            prefill_chunk=config.prefill_chunk,
            **room,
        )

    def request(self, ids: Sequence[int], **changes: int) -> Request:
        """Ask for an answer to a prompt.

        Args:
          changes: `max_new_tokens` or `seed` of this one, in place of the configuration's.
        """
        config = self.config
        sampling = config.sampling.params(changes.get("seed"))
        most = changes.get("max_new_tokens", config.max_new_tokens)
        stop_ids = () if config.ignore_eos else self.eos_ids
        return Request(prompt=ids, max_new_tokens=most, sampling=sampling, stop_ids=stop_ids)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the tokens of a prompt.

        Raises:
          ConfigError: it is no text, or no tokens.
        """
        ids = self.tokenizer.encode(text, special)
        if not ids:
            raise ConfigError("the prompt is empty: give the text to continue")
        return ids

    def chat_template(self) -> ChatTemplate:
        """Read the target's chat template.

        Raises:
          ConfigError: it has none.
        """
        if self.config.target is None:
            raise ConfigError("messages need a chat model: give --target DIR")
        return ChatTemplate.load(self.config.target)


def build(config: DecodeConfig) -> Engine:
    """Load, or make, what the configuration names; on the current mesh, if there is one.

    Raises:
      ValueError: a directory cannot be used, or the two do not fit together.
    """
    for name, directory in (("target", config.target), ("draft", config.draft)):
        if directory is not None and not Path(directory).is_dir():
            hint = "; `make demo` trains a small target" if name == "target" else ""
            raise ConfigError(
                f"{name} {directory} is no directory: give one with config.json and safetensors"
                + hint
            )
    packer = _packer(config)
    for_draft = _draft_packer(config, packer)
    config = dataclasses.replace(config, draft_dtype=for_draft.dtype)
    dtype = packer.load_dtype
    if config.target is None:
        log.warning("the target has random weights: its text means nothing")
        target = generated_target(config.generated, dtype)
        check_shape(config.mesh, target.cfg)
        target = place_module(target)
    else:
        check_shape(config.mesh, TargetConfig.from_hf(config.target))
        target = load_pretrained(config.target, dtype, packer)
    method, draft = config.method or "eagle3", None
    if config.draft is None:
        method = "autoregressive"
    elif method == "eagle3":
        draft = load_draft(config.draft, target, for_draft.load_dtype)
        check_shape(config.mesh, draft.cfg)
        draft = place_module(draft)
    if config.deterministic and (why := packer.bitwise_problem(target.cfg)):
        raise ConfigError(
            f"deterministic is on, but the texts of speculative and plain decoding may part where"
            f" two tokens are about as likely: {why}; leave it off to decode all the same"
        )
    if draft is None:
        finish((target, packer))
    else:
        finish((target, packer), (draft, for_draft))
    drafter = make_drafter(method, draft, config.tree.plan(), config.recalibrate)
    tokenizer = load_tokenizer(config.target, target.cfg.vocab_size)
    ids = target.cfg.eos_token_ids
    if config.target is not None:
        ids = end_ids(config.target, tokenizer, target.cfg.vocab_size)
    return Engine(config, target, drafter, tokenizer, ids)


def _packer(config: DecodeConfig) -> Packer:
    """Say how weights are kept: for the native kernels where there are any, else for XLA."""
    if config.native != "auto" or jax.default_backend() != "cpu":
        return Packer(config.dtype, native=False)
    if active_mesh() is not None:
        log.warning("native kernels are for one device: on this mesh they are off")
        return Packer(config.dtype, native=False)
    if (why := native.problem()) is not None:
        log.warning("without native kernels, so slower (native=off: without this line): %s", why)
    return Packer(config.dtype, native=why is None)


def _draft_packer(config: DecodeConfig, packer: Packer) -> Packer:
    """Say how the draft's weights are kept: as small as may be, as no text depends on them."""
    return Packer(config.draft_dtype or ("int8" if packer.native else config.dtype), packer.native)
