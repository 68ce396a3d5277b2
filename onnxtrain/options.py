"""The environment variables that onnxtrain reads: one list, from which the parser, docs/environment.md
(tools/environment.py) and a test are made.

A value out of range is one warning that names variable, value and choices, and the default is used.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from collections.abc import Callable
from typing import Any

_log = logging.getLogger("onnxtrain")


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not low <= int(text) <= high:
            raise ValueError(text)
        return int(text)

    return parse


def _boolean(text: str) -> bool:
    if text.lower() in ("1", "true", "on"):
        return True
    if text.lower() in ("0", "false", "off", ""):
        return False
    raise ValueError(text)


def _inverted(text: str) -> bool:
    return not _boolean(text)


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        return choices[[choice.upper() for choice in choices].index(text.upper())]

    return parse


def _policy(text: str) -> object:
    from onnxtrain.ortmodule._fallback import FallbackPolicy

    return FallbackPolicy.parse(text)


def _skip_check(text: str) -> object:
    from onnxtrain.ortmodule.options import _SkipCheck

    return _SkipCheck.parse(text)


def _default_opset() -> int:
    import onnxtrain.ortmodule

    return onnxtrain.ortmodule.ONNX_OPSET_VERSION  # a script may set it


def default_cache() -> str:
    """The user's folder for what programs can make again; "" where there is none."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    return os.path.join(base, "onnxtrain") if os.path.isabs(base) else ""


def _default_skip_check() -> object:
    return _skip_check("SKIP_CHECK_DEVICE|SKIP_CHECK_BUILD_GRADIENT|SKIP_CHECK_EXECUTION_AGENT")


def _budget(text: str) -> float | None:
    """Bytes, or a fraction of at most 1; None where there is none."""
    if not text:
        return None
    if text.endswith("%"):
        value = float(text[:-1]) / 100
        if not 0 < value <= 1:
            raise ValueError(text)
        return value
    units = {"": 1, "B": 1, **{unit + end: 1024**power for power, unit in enumerate("KMGT", 1)
                               for end in ("", "B", "IB")}}
    number = text.upper().rstrip("BIKMGT ")
    value = float(number) * units[text.upper()[len(number):].strip()]
    if not 1 < value < 2**60:
        raise ValueError(text)
    return value


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _results(text: str) -> tuple[str | int, ...]:
    return tuple(int(name) if name.lstrip("-").isdigit() else name for name in _names(text))


@dataclasses.dataclass(frozen=True)
class Variable:
    """One variable: `parse` raises ValueError or KeyError for a value that is none of `choices`."""

    name: str
    default: Any  # a function makes it where it cannot be made at import
    parse: Callable[[str], object]
    choices: str
    effect: str
    default_text: str | None = None
    older: tuple[tuple[str, Callable[[str], object]], ...] = ()  # older names, and their parsers

    def read(self) -> Any:
        """The value, parsed; the default where it is not set, or is none of the choices."""
        default = self.default() if callable(self.default) else self.default
        for name, parse in ((self.name, self.parse), *self.older):
            text = os.environ.get(name)
            if text is None:
                continue
            try:
                return parse(text.strip())
            except (ValueError, KeyError):
                _warn_once(f"{name}={text} is not one of: {self.choices}; using {self.shown_default}")
                return default
        return default

    @property
    def shown_default(self) -> str:
        """The default as a user would write it."""
        if self.default_text is not None:
            return self.default_text
        texts = {True: "1", False: "0", None: "not set", "": "not set", (): "not set"}
        return texts.get(self.default, str(self.default))


_said: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        _log.warning("%s", text)


PASSES = ("align_products", "channels_last", "conv_to_gemm", "cse", "fuse_attention",
          "fuse_batchnorm", "fuse_conv_relu", "fuse_elementwise", "fuse_gelu", "fuse_gemm", "fuse_gradients",
          "fuse_loss", "fuse_norm", "fuse_reductions", "fuse_rms_norm", "fuse_rotary", "fuse_sparse_matmul",
          "fuse_sums", "fuse_transpose", "join_slices", "keep_narrow", "narrow_rotary", "pack_rows", "precision",
          "recompute", "recompute_regions", "row_indices", "schedule", "stream_loss", "whole_step", "winograd")
_FLAG = "0, 1"
_ON_THE_CPU = "1 on the CPU, 0 on a GPU"
_NAMES = [
    Variable("ORTMODULE_ONNX_OPSET_VERSION", _default_opset, _integer(7, 25),
             "a number from 7 to 25", "opset of the export: 18 to 22; of another number the nearest of these, but "
             "graphs that are saved have an older one",
             default_text="20"),
    Variable("ORTMODULE_LOG_LEVEL", None, _one_of("VERBOSE", "DEVINFO", "INFO", "WARNING", "ERROR", "FATAL"),
             "VERBOSE, DEVINFO, INFO, WARNING, ERROR, FATAL", "overrides DebugOptions(log_level=)"),
    Variable("ORTMODULE_OUTPUTS", (), _results, "names or positions, joined by commas",
             "the results of forward that the script reads in training, such as `loss`: ORTModule(outputs=) of every "
             "module that is wrapped without it. The others are None in training"),
    Variable("ORTMODULE_SAVE_ONNX_PATH", "", str, "a folder", "folder to which DebugOptions(save_onnx=True) writes"),
    Variable("ORTMODULE_FALLBACK_POLICY", None, _policy,
             "FALLBACK_DISABLE, FALLBACK_FORCE_TORCH_FORWARD, FALLBACK_FORCE_TORCH_BACKWARD, "
             "FALLBACK_UNSUPPORTED_DEVICE, FALLBACK_UNSUPPORTED_DATA, FALLBACK_UNSUPPORTED_TORCH_MODEL, "
             "FALLBACK_UNSUPPORTED_ONNX_MODEL, FALLBACK_BAD_INITIALIZATION; joined by |",
             "the kinds of fallback to PyTorch that are allowed; FALLBACK_DISABLE makes every fallback an exception",
             default_text="FALLBACK_UNSUPPORTED_DEVICE|FALLBACK_UNSUPPORTED_DATA|FALLBACK_UNSUPPORTED_TORCH_MODEL|"
                          "FALLBACK_UNSUPPORTED_ONNX_MODEL"),
    Variable("ORTMODULE_FALLBACK_RETRY", False, _boolean, _FLAG, "after a fallback, try the engine again at each step"),
    Variable("ORTMODULE_ENABLE_CUSTOM_AUTOGRAD", True, _boolean, _FLAG,
             "1 runs a torch.autograd.Function in torch, as a PythonOp node; 0 traces through it, which is accepted if "
             "one step then equals eager's",
             older=(("ORTMODULE_DISABLE_CUSTOM_AUTOGRAD_SUPPORT", _inverted),)),
    Variable("ORTMODULE_SKIPPED_AUTOGRAD_FUNCTIONS", (), _names, "full names of classes, joined by commas",
             "these are traced through like plain functions: autograd differentiates their forward"),
    Variable("ORTMODULE_CACHE_DIR", default_cache, os.path.expanduser, "a folder; empty: none",
             "keeps exports on disk for the next process; if this variable is set, also which kernels of products won "
             "and compiled CUDA kernels; the default is in $XDG_CACHE_HOME if that is set",
             default_text="~/.cache/onnxtrain"),
    Variable("ORTMODULE_SKIPCHECK_POLICY", _default_skip_check, _skip_check, "SKIP_CHECK_* names joined by |",
             "`skip_check` of a module's runtime options, for scripts that read it: all checks run at every step, and "
             "take microseconds",
             default_text="SKIP_CHECK_DEVICE|SKIP_CHECK_BUILD_GRADIENT|SKIP_CHECK_EXECUTION_AGENT"),
    Variable("ORTMODULE_ENABLE_COMPUTE_OPTIMIZER", True, _boolean, _FLAG,
             "1 computes only the rows that later nodes read, as before x[:, 0] or the selection of a last token, and "
             "allows the next two. 0 turns off all three"),
    Variable("ORTMODULE_ENABLE_SPARSE_OPTIMIZER", True, _boolean, _FLAG, "0 turns off the next two"),
    Variable("ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER", None, _boolean, _FLAG,
             "1 skips the scores of a cross-entropy in the module whose labels are ignored in the batch, unless the "
             "scores are also a result of the module; on a GPU the host waits in each step for their number. 0 "
             "computes the scores of all tokens, padding included", default_text=_ON_THE_CPU),
    Variable("ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER", None, _boolean, _FLAG,
             "1 skips the tokens of each batch that the attention mask hides from all others, and that no label and no "
             "result needs; on a GPU as above", default_text=_ON_THE_CPU),
    Variable("ORTMODULE_MEMORY_OPT_LEVEL", 0, _integer(0, 2), "0, 1, 2",
             "how much backward may recompute to save memory. 0, on the CPU: elementwise operators, norms, operators "
             "that only move data, rounded weights and attention, for at most 2% of a step's work, and on a GPU "
             "elementwise operators within the kernels that read them; 1: matrix products too, on every device, for at "
             "most 20%; 2: at most 45%, some nodes several times. The memory plan selects the nodes, and inputs that "
             "they read must not change before backward. At every level the CPU does not store the scores of a large "
             "vocabulary whose loss is in the module, and a GPU has pieces of them where that saves 256 MiB, from "
             "level 1 on 4 MiB"),
    Variable("ORTMODULE_MEMORY_OPT_BUDGET", None, _budget, "bytes as 300MB or 4GB, or 1% to 100%",
             "limit of the planned activations of a step, in bytes (units of 1024) or as a share of the level's plan: "
             "backward recomputes the nodes with the lowest cost per byte until the memory plan fits. Results have "
             "the same bits. If no plan fits, a warning names the smallest one"),
    Variable("ORTMODULE_MEMORY_OPT_CONFIG", "", str, "a path of a JSON list of plans, or plans joined by commas",
             "subgraphs that backward recomputes, at any cost: `Op+Op+:type:count` with ONNX's names of "
             "operators, or onnxruntime's fused ones; type 0 none, 1 recompute, 2 keep the narrower operand of a Cast; "
             "count -1 all, or the first so many. At log level INFO a table lists those of the graph. Read at "
             "ORTMODULE_MEMORY_OPT_LEVEL=0 only. A malformed plan raises ValueError"),
    Variable("ORTMODULE_PRINT_INPUT_DENSITY", False, _boolean, _FLAG,
             "1 prints at each step the share of computed rows, of labels and of tokens"),
    Variable("ORTMODULE_PRINT_MEMORY_STATS", False, _boolean, _FLAG,
             "prints the planned memory by phase, on the first ten steps and then "
             "at powers of two"),
    Variable("ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT", False, _boolean, _FLAG,
             "1 hides parameters from autograd: one node writes their gradients to .grad, which saves microseconds for "
             "each parameter. torch.autograd.grad(loss, parameters) and backward(inputs=...) then cannot reach them. "
             "No effect if torch.distributed is initialized. To save the memory of gradients, use "
             "onnxtrain.optim.step_in_backward"),
    Variable("ORTMODULE_JSON_CONFIG_PATH", "", str, "a path", "overrides the path given to load_from_json"),
    Variable("ORTMODULE_CUDA_GRAPH", True, _boolean, _FLAG,
             "on CUDA, a phase is captured after two calls and replayed as one graph; if it is not, explain() has the "
             "reason"),
    Variable("ONNXTRAIN_ISA", None, _one_of("plain", "avx2", "avx512", "neon"),
             "plain, avx2, avx512; on aarch64 plain, neon",
             "the highest instruction set that kernels may use; read by the core",
             default_text="the best that the processor has"),
    Variable("ONNXTRAIN_GEMM", None,
             _one_of("torch", "onednn", "primitive", "native", "reference", "tiled", "plain"),
             "torch, onednn, primitive, native, reference",
             "implementation of every matrix product but those of attention; then a step has the same last bits in "
             "every process; read by the core",
             default_text="kernels compete in the first runs of each kind of product"),
    Variable("ONNXTRAIN_FLUSH_DENORMALS", True, _boolean, _FLAG,
             "denormal floats count as zero while the engine's kernels run; "
             "read by the core"),
    Variable("ONNXTRAIN_REDUCE_DTYPE", "", _one_of("float32", "bfloat16"), "float32, bfloat16",
             "dtype in which ORTTrainer sends and adds gradients between processes; it must be the same in all of them",
             default_text="that of the weights"),
    Variable("ONNXTRAIN_DISABLE", (), _names, f"{', '.join(PASSES)}; joined by commas",
             "turns off optional passes; `schedule` turns off the reordering of steps, `winograd` Winograd's "
             "convolution, `whole_step` the trainers' step in one call"),
]
VARIABLES = {variable.name: variable for variable in _NAMES}
# Names of the old release, and of earlier versions, that have no effect: what is here instead.
IGNORED = {
    "ONNXTRAIN_CAPTURE": "Dynamo captures every module",
    "ONNXTRAIN_EXPORTER": "torch.export and torch.onnx export every graph",
    "ORTMODULE_ALLOW_AUTOGRAD_CHECKPOINT": "torch.utils.checkpoint inside a module is always accepted: backward keeps "
    "its inputs and outputs, and recomputes the rest, at every ORTMODULE_MEMORY_OPT_LEVEL",
    "ORTMODULE_ATEN_SDPA_FALLBACK": "the engine fuses attention wherever it can",
    "ORTMODULE_CONV_ALGO_SEARCH": "the engine measures the candidates: on the CPU Winograd and oneDNN, on CUDA the "
    "algorithms of cuDNN",
    "ORTMODULE_DEEPCOPY_BEFORE_MODEL_EXPORT": "an export restores the module exactly, so no copy is needed",
    "ORTMODULE_ENABLE_TUNING": "kernels of matrix products compete in the first runs of each kind, unless "
    "ONNXTRAIN_GEMM names one or torch.use_deterministic_algorithms() asks for a rule",
    "ORTMODULE_ENABLE_ZERO_STAGE3": "ZeRO 3 is not supported; stages 1 and 2 need no setting",
    "ORTMODULE_MAX_TUNING_DURATION_MS": "kernels compete in a fixed number of runs, nine at most",
    "ORTMODULE_TRITON_CONFIG_FILE": "there are no Triton kernels",
    "ORTMODULE_TRITON_DEBUG": "there are no Triton kernels",
    "ORTMODULE_TUNING_RESULTS_PATH": "ORTMODULE_CACHE_DIR keeps measurements",
    "ORTMODULE_USE_EFFICIENT_ATTENTION": "the engine fuses attention wherever it can",
    "ORTMODULE_USE_FLASH_ATTENTION": "the engine fuses attention wherever it can",
    "ORTMODULE_USE_TRITON": "on CUDA, NVRTC compiles groups of operators when a program is built; other kernels are "
    "prebuilt",
}
KNOWN = VARIABLES | {name: variable for variable in _NAMES for name, _ in variable.older}


def read(name: str) -> Any:
    """The value of one variable of the list, parsed, or its default."""
    return VARIABLES[name].read()


def warn_of_ignored() -> None:
    """One line for each variable that is set and has no effect here, and for what is misspelt. Called when a module is
    wrapped.
    """
    for name in [name for name in os.environ if "MODULE_" in name or "TRAIN_" in name]:
        if name in KNOWN:
            KNOWN[name].read()
        elif name in IGNORED:
            _warn_once(f"{name}={os.environ[name]} has no effect in onnxtrain: {IGNORED[name]}")
        elif near := difflib.get_close_matches(name, KNOWN, 1, 0.85):
            _warn_once(f"{name} is not a variable that onnxtrain reads; {near[0]} is")
        elif name.startswith("ORTMODULE_"):  # a build and the tests have names of their own with ONNXTRAIN_
            _warn_once(f"{name} is not a variable that onnxtrain reads; docs/environment.md lists those that are")
    for name in read("ONNXTRAIN_DISABLE"):
        if name.removeprefix("+") not in PASSES:
            _warn_once(f"ONNXTRAIN_DISABLE={name}: there is no such pass; those that there are: {', '.join(PASSES)}")
