"""The engines of benchmarks/peers.py, each to be run in a process of its own; a module, no script.

An engine is a class that is made from `Settings` and has three methods: `generate`, `verify` and
`score`. What an engine needs is imported when it is made, so that its process holds nothing else.
Every process waits for commands and sends answers; a class of any kind can be served like this.
"""

import ctypes
import multiprocessing as mp
import os
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

NODES = (1, 2, 4, 8, 16)
CONTEXT, REPEATS = 64, 8  # tokens before a pass that is measured, and passes of a sample
LOOKUP_TOKENS = 2
OURS, DRAFTED, TORCH, LLAMA, LOOKUP = (
    "this package", "with draft", "transformers", "llama.cpp", "llama.cpp, lookup"
)  # fmt: skip


class EngineError(Exception):
    """An engine that could not do what it was asked; one line."""


class Settings(NamedTuple):
    """What an engine is made from."""

    target: str  # Hugging Face directory
    dtype: str
    longest: int  # tokens of the longest prompt and its answer
    draft: str | None = None
    gguf: str = ""  # the target as llama.cpp reads it
    overrides: tuple[str, ...] = ()


class Generated(NamedTuple):
    """A greedy answer."""

    tokens: list[int]
    passes: int  # of the target
    seconds: float  # after all of the prompt but its last token was read
    total: float  # seconds


class Ours:
    """This package; all its loops run on the device."""

    def __init__(self, settings: Settings):
        import jax
        import jax.numpy as jnp
        from flax import nnx

        from eagle3.cli.engine import build
        from eagle3.config import DecodeConfig
        from eagle3.config_reader import read_config
        from eagle3.machine import keep_compiled_programs
        from gdn import chain_tree, commit, init_cache

        keep_compiled_programs()
        texts = {"target": settings.target, "dtype": settings.dtype}
        texts |= {"draft": settings.draft} if settings.draft else {}
        engine = build(read_config(DecodeConfig, None, settings.overrides, **texts))
        self.session, target = engine.session(engine.drafter), engine.target
        graph, params = nnx.split(target)
        self.params, self.jax = nnx.to_pure_dict(params), jax
        kept = target.embed_tokens[...].dtype
        capacity = CONTEXT + max(NODES) * REPEATS
        self.cache = lambda: init_cache(target.cfg, 1, capacity, kept)

        def start(params, tokens, cache):
            lengths = jnp.array([CONTEXT], jnp.int32)
            return nnx.merge(graph, params).prefill(tokens, lengths, cache).cache

        def score(params, tokens, cache):
            tree = chain_tree(1, tokens.shape[1])
            return nnx.merge(graph, params).verify(tokens, tree, cache).logits

        def repeat(params, tokens, cache):
            model, nodes = nnx.merge(graph, params), tokens.shape[1]
            tree = chain_tree(1, nodes)

            def step(_, carry):
                tokens, cache = carry
                out = model.verify(tokens, tree, cache)
                # The maximum, then where it is: XLA's argmax is slow over a vocabulary.
                best = jnp.argmax(out.logits == out.logits.max(-1, keepdims=True), axis=-1)
                path = jnp.where(best >= 0, jnp.arange(nodes), -1)  # after the cache's last reading
                return best.astype(jnp.int32), commit(cache, out.updates, path)

            return jax.lax.fori_loop(0, REPEATS, step, (tokens, cache))

        self.start, self.score_ = jax.jit(start, donate_argnums=2), jax.jit(score)
        self.repeat = jax.jit(repeat, donate_argnums=2)

    def generate(self, prompt: Sequence[int], count: int) -> Generated:
        """Answer greedily with `count` tokens."""
        from eagle3.decoding.request import Request

        begin = time.perf_counter()
        self.session.start([Request(prompt=prompt, max_new_tokens=count)])
        self.jax.block_until_ready(self.session._state)
        middle = time.perf_counter()
        while self.session.is_running:
            self.session.advance()
        end = time.perf_counter()
        answer = self.session.answers[0]
        return Generated(answer.tokens, answer.rounds, end - middle, end - begin)

    def verify(self, nodes: int) -> float:
        """Return seconds of a pass over so many tokens."""
        tokens = np.zeros((1, nodes), np.int32)
        cache = self._started(np.arange(CONTEXT))
        begin = time.perf_counter()
        self.jax.block_until_ready(self.repeat(self.params, tokens, cache))
        return (time.perf_counter() - begin) / REPEATS

    def score(self, ids: Sequence[int]) -> np.ndarray:
        """Return logits [n, V] of one pass over all tokens after the first CONTEXT ones."""
        cache = self._started(ids[:CONTEXT])
        return np.asarray(self.score_(self.params, np.array([ids[CONTEXT:]], np.int32), cache))[0]

    def _started(self, ids):
        cache = self.start(self.params, np.array(ids, np.int32)[None], self.cache())
        return self.jax.block_until_ready(cache)


class Peer:
    """What both others have in common: the loop over tokens is here, in Python."""

    def _start(self, ids: Sequence[int]) -> None:
        """Read a new text."""
        raise NotImplementedError

    def _pass(self, ids: Sequence[int]) -> np.ndarray:
        """Read tokens and return the logits [n, V] of all."""
        raise NotImplementedError

    def generate(self, prompt: Sequence[int], count: int) -> Generated:
        """Answer greedily with `count` tokens."""
        begin = time.perf_counter()
        self._start(prompt[:-1])
        middle = time.perf_counter()
        tokens, passes = self._continue(list(prompt), count)
        end = time.perf_counter()
        return Generated(tokens, passes, end - middle, end - begin)

    def _continue(self, text: list[int], count: int) -> tuple[list[int], int]:
        """Return `count` tokens after a text of which all but the last was read, and passes."""
        length = len(text)
        for _ in range(count):
            text.append(int(self._pass(text[-1:])[-1].argmax()))
        return text[length:], count

    def verify(self, nodes: int) -> float:
        """Return seconds of a pass over so many tokens."""
        self._start(range(CONTEXT))
        begin = time.perf_counter()
        for _ in range(REPEATS):
            self._pass([0] * nodes).argmax(-1)
        return (time.perf_counter() - begin) / REPEATS

    def score(self, ids: Sequence[int]) -> np.ndarray:
        """Return logits [n, V] of one pass over all tokens after the first CONTEXT ones."""
        self._start(ids[:CONTEXT])
        return np.array(self._pass(ids[CONTEXT:]))


class Transformers(Peer):
    """transformers as it comes, on all cores."""

    def __init__(self, settings: Settings):
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_grad_enabled(False)
        torch.set_num_threads(threads())
        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            settings.target, dtype=getattr(torch, settings.dtype), attn_implementation="sdpa"
        )

    def _start(self, ids):
        self.held = self.model(self.torch.tensor([list(ids)]), use_cache=True, logits_to_keep=1)

    def _pass(self, ids):
        # The field was renamed in the course of transformers 5.
        name = "cache" if getattr(self.held, "cache", None) is not None else "past_key_values"
        held = {name: getattr(self.held, name)}
        self.held = self.model(self.torch.tensor([list(ids)]), use_cache=True, **held)
        return self.held.logits[0].float().numpy()


class LlamaCpp(Peer):
    """llama.cpp through its C interface, without the work of its Python class in between."""

    rollback = 0  # tokens that a recurrent state can be taken back

    def __init__(self, settings: Settings):
        import llama_cpp as lib

        self.lib: Any = lib
        self.quiet = lib.llama_log_callback(lambda level, text, data: None)  # C does not keep it
        lib.llama_log_set(self.quiet, ctypes.c_void_p(None))
        lib.llama_backend_init()
        file = settings.gguf.encode()
        self.model = self.lib.llama_model_load_from_file(file, lib.llama_model_default_params())
        if not self.model:
            raise ValueError(f"it does not take the file written for it, {settings.gguf}")
        self.vocab = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))
        self.settings, self.context = settings, None
        self._open(settings.longest)
        self.size = lib.llama_context_default_params().n_batch
        batch = self.batch = lib.llama_batch_init(self.size, 0, 1)
        arrays = (batch.token, batch.pos, batch.logits, batch.n_seq_id)
        views = [np.ctypeslib.as_array(array, (self.size,)) for array in arrays]
        self.tokens, self.places, self.wanted, counts = views
        counts[:] = 1
        for place in range(self.size):
            batch.seq_id[place][0] = 0

    def _open(self, longest: int, is_exact: bool = False):
        """Make a context in place of the one there is, with 16 bits nowhere if `is_exact`."""
        if self.context:
            self.lib.llama_free(self.context)
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_rs_seq = longest, self.rollback
        params.n_threads = params.n_threads_batch = threads()
        if is_exact:
            params.type_k = params.type_v = self.lib.GGML_TYPE_F32
            params.flash_attn_type = self.lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = self.lib.llama_init_from_model(self.model, params)
        if not self.context:
            raise ValueError(f"it makes no context for {longest} tokens")
        self.memory = self.lib.llama_get_memory(self.context)

    def score(self, ids):
        """Return the logits as above, in float32 without the 16 bits that attention has else."""
        if self.settings.dtype != "float32":
            return super().score(ids)
        self._open(len(ids), is_exact=True)
        logits = super().score(ids)
        self._open(self.settings.longest)
        return logits

    def _start(self, ids):
        self.lib.llama_memory_clear(self.memory, True)
        self.length = 0
        for first in range(0, len(ids), self.size):
            self._read(ids[first : first + self.size], wanted=False)

    def _pass(self, ids):
        self._read(ids, wanted=True)
        logits = self.lib.llama_get_logits(self.context)
        return np.ctypeslib.as_array(logits, (len(ids), self.vocab))  # valid until the next pass

    def _read(self, ids, wanted: bool):
        count = len(ids)
        self.tokens[:count], self.wanted[:count] = ids, wanted
        self.places[:count] = np.arange(self.length, self.length + count)
        self.batch.n_tokens = count
        if code := self.lib.llama_decode(self.context, self.batch):
            raise ValueError(f"llama_decode returned {code} at {self.length} + {count} tokens")
        self.length += count


class Lookup(LlamaCpp):
    """The same with the drafts of llama-cpp-python: what came after the last tokens before."""

    rollback = LOOKUP_TOKENS

    def __init__(self, settings: Settings):
        super().__init__(settings)
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self.draft = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS)

    def _continue(self, text, count):
        length, passes = len(text), 0
        while (missing := length + count - len(text)) > 0:
            guess = self.draft(np.array(text, np.intc))[: missing - 1].tolist()
            best = self._pass([text[-1], *guess]).argmax(-1).tolist()
            right = 0
            while right < len(guess) and guess[right] == best[right]:
                right += 1
            text += best[: right + 1]
            passes += 1
            self.length -= len(guess) - right
            if not self.lib.llama_memory_seq_rm(self.memory, 0, self.length, -1):
                raise ValueError("this architecture takes no token back")
        return text[length:], passes


ENGINES = {OURS: Ours, DRAFTED: Ours, TORCH: Transformers, LLAMA: LlamaCpp, LOOKUP: Lookup}


def threads() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_memory() -> int:
    """Return the largest resident size of this process so far, in bytes."""
    try:
        # Not what getrusage says: that is at least the size of the process that started this one.
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(x.split()[1]) for x in lines if x.startswith("VmHWM")) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def serve(connection, make: Callable[[Any], Any], settings: Any) -> None:
    """Make an engine, then call its methods as told; after None, answer with the peak memory."""
    try:
        engine = make(settings)
        connection.send((True, None))
        while (command := connection.recv()) is not None:
            name, *arguments = command
            connection.send((True, getattr(engine, name)(*arguments)))
        connection.send((True, peak_memory()))
    except EOFError:  # whoever asks is gone
        pass
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        connection.send((False, f"{type(error).__name__}: {first}"))


class Worker:
    """A process with one engine in it."""

    def __init__(self, make: Callable[[Any], Any], settings: Any):
        """Start it and wait until the engine is there.

        Raises:
          EngineError: it could not be made.
        """
        context = mp.get_context("spawn")
        self.connection, theirs = context.Pipe()
        arguments = (theirs, make, settings)
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()  # or the end of the process would not be noticed
        self._receive()

    def _receive(self) -> Any:
        try:
            is_answer, value = self.connection.recv()
        except EOFError:
            self.process.join()
            code = self.process.exitcode
            raise EngineError(f"its process ended with exit code {code}") from None
        if not is_answer:
            raise EngineError(value)
        return value

    def ask(self, *command: Any) -> Any:
        """Call a method, named first.

        Raises:
          EngineError: it failed, or the process ended; this worker is of no use any more.
        """
        self.connection.send(command)
        return self._receive()

    def stop(self) -> int:
        """End it; returns its peak memory in bytes."""
        self.connection.send(None)
        memory = self._receive()
        self.process.join()
        return memory
