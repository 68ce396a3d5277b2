"""Every private name of PyTorch that onnxtrain reads or replaces, once: what for, and what it was checked against.

Private is a name with an underscore in its path below torch; the dicts of torch.nn.Module and operators are not. Other
files import the short names that are read from here (`from onnxtrain._torch import pytree`), and give those that are
replaced to state.wrapped(). `python -m onnxtrain doctor` prints the table. csrc/py/torch_abi.c has its own, of C++.
Attributes of objects have no path: ATTRIBUTES has those. METHODS has what is replaced on objects of other libraries.

A name that is replaced is *needed* where results would be wrong, or be lost, without; it is replaced in any torch. The
others are *wanted*: for speed, or for fewer cuts of a graph. Of these the source must be one that was checked, so that
another release of PyTorch is left alone at a function that it has changed.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import itertools
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch

_log = logging.getLogger("onnxtrain")
CHECKED = ("2.10.0", "2.13.0", "2.15.0")  # releases of torch


class Value(Protocol):
    """What is used of Dynamo's variable for a value that it follows."""

    def as_proxy(self) -> Any: ...
    def as_python_constant(self) -> Any: ...
    def is_python_constant(self) -> bool: ...
    def python_type(self) -> type: ...
    def call_method(self, tx: Translator, name: str, args: Values, kwargs: Named) -> Value: ...


class Translator(Protocol):
    """What is used of Dynamo's reader of a function's instructions."""

    output: Any  # the graph that it writes
    instructions: Sequence[Any]
    indexof: Mapping[object, int]
    instruction_pointer: Any
    stack: list[Value]

    def push(self, value: Value) -> None: ...
    def pop(self) -> Value: ...


Values = Sequence[Value]
Named = dict[str, Value]  # arguments by name


class Name(NamedTuple):
    """One private name.

    Attributes:
        path: MODULE:NAME, or MODULE:CLASS.NAME; MODULE: is the module itself.
        use: what for, in a few words.
        how: whether it is read, or replaced by a function of onnxtrain's: for a while, once for the process, or on one
            object.
        needed: onnxtrain does not run without it.
        known: digest() of each source that it was checked against; of what is read, none.
        lacks: the CHECKED releases that have no such name.
    """

    path: str
    use: str
    how: Literal["read", "replaced for a while", "replaced for good", "replaced on an object"] = "read"
    needed: bool = True
    known: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    def dotted(self) -> str:
        return self.path.replace(":", ".").rstrip(".")


def _read(module: str, use: str, names: str, **how: Any) -> Iterator[tuple[str, Name]]:
    """Names of one module: SHORT=NAME, or NAME, whose short form has no underscore in front."""
    for each in names.split():
        short, _, name = each.rpartition("=")
        yield short or name.rpartition(".")[2].lstrip("_"), Name(f"{module}:{name}", use, **how)


def _replaced(use: str, needed: bool, names: str, **how: Any) -> Iterator[tuple[str, Name]]:
    """Names that serve one purpose, of each: SHORT PATH, and the digests that are known."""
    words = names.split()
    starts = [i for i, path in enumerate(words[1:]) if ":" in path]
    for start, end in zip(starts, [*starts[1:], len(words)]):
        short, path, *known = words[start:end]
        yield short, Name(path, use, **{"how": "replaced for a while"} | how, needed=needed, known=tuple(known))


NEEDED, WANTED = True, False
TABLE: dict[str, Name] = dict((
    # --- replaced -----------------------------------------------------------------------------------------------------
    *_replaced("captures do not import what they only compare with, nor make texts for logs that are off", WANTED, """
        get_compiler_fn torch._dynamo.eval_frame:get_compiler_fn ac4ba1ac88f7 9109d3d1cd47 f6add13b2b66
        throw_if_in_functorch torch._dynamo.symbolic_convert:InstructionTranslator._throw_if_in_functorch 4b3bb2150553
        uninteresting_files torch.fx.experimental.symbolic_shapes:uninteresting_files 754bb46f20ce a12fcde8b3fb
        uninteresting_files_of_graphs torch._dynamo.output_graph:uninteresting_files 754bb46f20ce a12fcde8b3fb
        get_funcname torch._dynamo.symbolic_convert:get_funcname c8c36f11edf3 fe761affe6d6
    """),
    *_replaced("captures do not import a class of torch.export's to leave it out", WANTED, """
        side_effect_sources torch._dynamo.output_graph:OutputGraph.get_replayed_side_effect_source_refs
            eb0782bab02c 75f5912534f4
    """, lacks=("2.10.0",)),
    *_replaced("captures in which the second of two equal layers takes its results' sizes from the first", WANTED, """
        run_node torch._dynamo.utils:run_node 682535cfcae8 689d505456b5 01b357c808b2
    """),
    *_replaced("sizes whose formulas grow too long become constants", WANTED, """
        evaluate_expr torch.fx.experimental.symbolic_shapes:ShapeEnv.evaluate_expr 13318234adec 932cc2a8db0d
    """),
    *_replaced("print(), packed sequences, NumPy of numbers, and numbers that change do not cut the graph", NEEDED, """
        call torch._dynamo.symbolic_convert:InstructionTranslatorBase.call_function da8145a4d6de 4647bcdd46c9
    """),
    *_replaced("packed sequences and recurrent layers stay in the graph", WANTED, """
        call_of_function torch._dynamo.variables:UserFunctionVariable.call_function
            4f53ead6166f 625ee85b426f daca84b90ecd
    """),
    *_replaced("numbers that change are inputs of the graph", WANTED, """
        call_of_tensors_method torch._dynamo.variables:TensorVariable.call_method ffd43059d2a4 d14b339ec2a1 42deed482385
    """),
    *_replaced("numbers of NumPy's are numbers, and not arrays", NEEDED, """
        load_import_from torch._dynamo.codegen:PyCodegen.load_import_from 815768e956ce
    """),
    *_replaced("texts of sizes, and calls that Python refuses, do not cut the graph", WANTED, """
        call_of_texts_method torch._dynamo.variables:ConstantVariable.call_method 03fc9785fca9 fc4dd8849f98 c796bda3129c
        call_of_builtin torch._dynamo.variables:BuiltinVariable.call_function dbd1cf98ace9 7e1a12fc51ac 3b46d5d9bdb9
        bind_args torch._dynamo.variables:UserFunctionVariable.bind_args d81f8ef2367b 51d79c4454d7
    """),
    *_replaced("what Dynamo gets wrong or does not take cuts: deque(maxlen=...), shuffle(), sparse tensors", NEEDED, """
        wrap_value torch._dynamo.variables.builder:VariableBuilder._wrap f468a27e6476 4f2d4895968d 423e3e9acc7b
        is_supported_random torch._dynamo.variables.misc:RandomVariable.is_supported_random_obj
            1bd06d3c87e5 085d59eb2330
    """),
    *_replaced("an operator with a sparse tensor cuts the graph at its line", WANTED, """
        binary_operators torch._dynamo.symbolic_convert:_binary_op_lookup list
    """),
    *_replaced("checks that only raise stay in the graph, and raise what forward raises", NEEDED, """
        translate_step torch._dynamo.symbolic_convert:InstructionTranslatorBase.step e3ce14d1a152 b0f37496add0
    """),
    *_replaced("what forward prints, logs and warns of does not cut the graph", WANTED, """
        call_of_logger torch._dynamo.variables.misc:LoggingLoggerVariable.call_method
            85bfed88c099 5369e8f5fd44 186048bd3534
    """),
    *_replaced("torch.autograd.grad() in forward stays in the graph", WANTED, """
        collect_backward_inputs torch._dynamo.variables.tensor:TensorVariable._collect_backward_inputs 80ef0273d77b
        check_leaks torch._dynamo.output_graph:OutputGraph._check_requires_grad_intermediate_outputs 238a78574ed3
    """, lacks=("2.10.0",)),
    *_replaced("torch.onnx finds the operator for operands that were cast", NEEDED, """
        find_compatible_overload torch.onnx._internal.fx.passes.type_promotion:find_compatible_op_overload
            407a435a5c2b 756282813c1b
    """),
    *_replaced("numbers of Python have float64's digits in a graph", NEEDED, """
        process_python_constants torch.onnx._internal.exporter:_building._process_python_constants
            894106863fde 19e963ebe91a
        set_shape_type torch.onnx._internal.exporter:_core._set_shape_type 85a38940873d a689b7c9baad
    """),
    *_replaced("masks of torch's transformers do not cut the graph", WANTED, """
        detect_is_causal_mask torch.nn.modules.transformer:_detect_is_causal_mask 02aea7d2142a
    """, how="replaced for good"),
    # --- read ---------------------------------------------------------------------------------------------------------
    *_read("torch", "operators of graphs, and what they are called by in Python",
           "_assert_async python_assert=_assert _ctc_loss _foreach_add_ _grouped_mm "
           "_native_batch_norm_legit _native_multi_head_attention _transformer_encoder_layer_fwd _VF"),
    *_read("torch._C", "operators of graphs, and what they are called by in Python",
           "nn_functions=_nn _is_tracing _set_grad_enabled _autograd._get_data_attr"),
    *_read("torch._ops", "operators of graphs", "OpOverload OpOverloadPacket"),
    *_read("torch.amp.autocast_mode", "operators of graphs", "_enter_autocast _exit_autocast"),
    *_read("torch.nn.functional", "what functions of PyTorch check first, and arguments of their older forms",
           "_Reduction _verify_batch_size _verify_spatial_size"),
    *_read("torch.utils", "the leaves of arguments and results", "_pytree"),
    *_read("torch._C", "modes that decide whether the engine runs a call, and which program",
           "DisableTorchFunction _are_functorch_transforms_active _get_deterministic_algorithms "
           "fp32_precision=_get_fp32_precision_getter _get_function_stack_at _get_tracing_state "
           "_is_any_autocast_enabled _len_torch_dispatch_stack _len_torch_function_stack"),
    *_read("torch._C._functorch", "tensors of torch.func and of vmap", "is_batchedtensor is_dead_tensor_wrapper "
           "is_legacy_batchedtensor peek_interpreter_stack unwrap_if_dead"),
    *_read("torch.autograd", "modes that decide whether the engine runs a call",
           "forward_ad_level=forward_ad._current_level"),
    *_read("torch.overrides", "modes that a graph is traced in", "_get_current_function_mode_stack"),
    *_read("torch.utils._device", "a default device is a mode that the engine may run in", "DeviceContext"),
    *_read("torch.utils._python_dispatch", "tensors that consist of others; modes that are off for a while",
           "_disable_current_modes is_traceable_wrapper_subclass"),
    *_read("torch._C", "what a backward asks of autograd", "_will_engine_execute_node "
           "keeps_graph=_autograd._get_current_graph_task_keep_graph"),
    *_read("torch.nn.modules.module", "global hooks, which a graph would not run", "_has_any_global_hook"),
    *_read("torch.nn.parallel", "a part of DistributedDataParallel's module is captured whole",
           "DistributedDataParallel._get_active_ddp_module", needed=WANTED),
    *_read("torch.optim.optimizer", "global hooks of optimizers",
           "_global_optimizer_pre_hooks _global_optimizer_post_hooks"),
    *_read("torch.autograd", "whether a profiler wants the names of operators",
           "_profiler_enabled in_profiler=profiler._is_profiler_enabled"),
    *_read("torch._C", "names of operators for a profiler", "_profiler._RecordFunctionFast"),
    *_read("torch._dynamo", "captures: settings, errors, cuts, and their locks and ends",
           "dynamo= dynamo_config=config callback_handler=callback.callback_handler "
           "compile_lock=convert_frame.compile_lock TorchDynamoException=exc.TorchDynamoException "
           "raise_observed_exception=exc.raise_observed_exception unimplemented=exc.unimplemented graph_break "
           "reset_code counters=utils.counters graph_break_reasons=utils.graph_break_reasons "
           "break_graph_if_unsupported=symbolic_convert.break_graph_if_unsupported"),
    *_read("torch._dynamo", "modules whose logs are filtered", "convert_frame"),
    *_read("torch", "modules that captures only compare with, and of whose files no message of a size names a line",
           "compiler_switches=_compile frames=_dynamo.eval_frame sizevars=_inductor.sizevars "
           "custom_ops=_library.custom_ops fake_impl=_library.fake_impl logging_internals=_logging._internal "
           "structured_logs=_logging.structured meta_utils=_subclasses.meta_utils symbolic_trace=fx._symbolic_trace "
           "export_trace=export._trace higher_order_ops=_higher_order_ops", needed=WANTED),
    *_read("torch._dynamo", "which names a capture has changed", "AttributeMutationExisting="
           "variables.base.AttributeMutationExisting ValueMutationExisting=variables.base.ValueMutationExisting "
           "guards symbolic_convert output_graph._get_source_debug_name", needed=WANTED),
    *_read("torch._C._dynamo.eval_frame", "how Dynamo treats a frame, and what it has captured of one",
           "_debug_get_cache_entry_list set_code_exec_strategy _FrameAction _FrameExecStrategy"),
    *_read("torch._dynamo.symbolic_convert", "modules that a capture has imported, which another may replace",
           "_import_module", needed=WANTED),
    *_read("torch._dynamo.variables", "values as Dynamo follows them",
           "ConstantVariable LazyVariableTracker ListVariable SymNodeVariable TensorVariable "
           "NumpyVariable SkipFunctionVariable TorchInGraphFunctionVariable UserFunctionVariable UserMethodVariable "
           "ValueMutationNew=base.ValueMutationNew VariableTracker=base.VariableTracker "
           "wrap_fx_proxy=builder.wrap_fx_proxy BaseListVariable=lists.BaseListVariable "
           "SizeVariable=lists.SizeVariable DebuggingVariable=misc.DebuggingVariable "
           "StringFormatVariable=misc.StringFormatVariable UnknownVariable=misc.UnknownVariable"),
    *_read("torch._dynamo.source", "where Dynamo has a value from", "AttrSource TensorPropertySource"),
    *_read("torch._dynamo.guards", "a guard of a sparse tensor's class", "GuardBuilder"),
    *_read("torch._dynamo.utils", "arrays of NumPy's that a graph returns", "to_numpy_helper"),
    *_read("torch._subclasses.fake_tensor", "tensors without data, and what they cannot do",
           "fake_tensor= FakeTensor FakeTensorMode in_kernel_invocation_manager DataDependentOutputException "
           "DynamicOutputShapeException UnsupportedFakeTensorException"),
    *_read("torch._C", "tensors without data: modes that results depend on", "_get_dispatch_mode "
           "_TorchDispatchModeKey"),
    *_read("torch._subclasses.meta_utils", "sparse tensors, of which there are none without data", "is_sparse_any"),
    *_read("torch._subclasses.functional_tensor", "a trace without changes in place",
           "FunctionalTensor FunctionalTensorMode"),
    *_read("torch", "a trace without changes in place", "_from_functional_tensor _functionalize_commit_update "
           "_functionalize_replace _functionalize_sync _sync"),
    *_read("torch", "decompositions of operators", "_decomp.decomposition_table "
           "enable_python_dispatcher=_dispatch.python.enable_python_dispatcher"),
    *_read("torch._C", "decompositions of operators", "_DisablePythonDispatcher "
           "dispatch_has_kernel=_dispatch_has_kernel_for_dispatch_key"),
    *_read("torch._C._autograd", "saved tensors' hooks that do not see an export", "_saved_tensors_hooks_set_tracing",
           needed=WANTED),
    *_read("torch._export", "which operators are composite; the logger", "export_internals= "
           "is_cia_op=utils._is_cia_op is_preservable_cia_op=utils._is_preservable_cia_op"),
    *_read("torch.onnx._internal.exporter", "a graph in ONNX: torch.onnx.export() in its parts, of which most programs "
           "need few", "exported_program_to_onnx_program=_core._exported_program_to_onnx_program "
           "create_onnx_friendly_decomposition_table=_decomp.create_onnx_friendly_decomposition_table "
           "get_onnx_implemented_overloads=_decomp.get_onnx_implemented_overloads "
           "remove_assertion_nodes=_fx_passes.remove_assertion_nodes _registration.ONNXRegistry "
           "_registration.OnnxDecompMeta _registration._get_overload _torchlib._torchlib_registry.get_torchlib_ops "
           "_tensors.SymbolicTensor _building._resolve_parameter_dtypes "
           "convert_version=_core.onnxscript_apis.convert_version"),
    *_read("torch.onnx._internal.exporter._capture_strategies", "recurrent layers of any length",
           "patch_dynamic_shape_rnn_decompositions", needed=WANTED, lacks=("2.10.0", "2.13.0")),
    *_read("torch.onnx._internal.fx", "casts around operands of several types",
           "type_utils.from_scalar_type_to_torch_dtype "
           "passes.type_promotion._TypePromotionInterpreter passes.type_promotion.InsertTypePromotion "
           "passes.type_promotion.TypePromotionTable passes.type_promotion.get_type_promotion_rule"),
    *_read("torch.onnx._internal.fx.passes.type_promotion", "casts around operands of several types",
           "_OpTraceDispatchMode", needed=WANTED, lacks=("2.13.0", "2.15.0")),
    *_read("onnxscript.function_libs.torch_lib.registration", "torchlib's translations", "default_registry"),
    *_read("torch.fx.experimental", "settings of sizes", "fx_config=_config"),
    *_read("torch.utils._sympy.printers", "formulas of sizes as Python", "PythonPrinter"),
))  # fmt: skip


METHODS: dict[str, Name] = dict((
    *_replaced("one pass over the gradients of ZeRO 1 and 2 for overflow, norm and clipping", WANTED, """
        has_overflow_serial deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.has_overflow_serial 589499f7025c
        has_overflow_partitioned_grads_serial
            deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.has_overflow_partitioned_grads_serial
            7b5357901255
        get_grad_norm_direct deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.get_grad_norm_direct
        unscale_and_clip_grads deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.unscale_and_clip_grads
    """, how="replaced on an object"),
    *_replaced("master gradients of Apex's O2 in one pass", WANTED, """
        post_amp_backward apex.amp._process_optimizer:post_backward_with_master_weights
    """, how="replaced on an object"),
    *_replaced("models run in the engine, and are saved as they are", WANTED, """
        prepare_model accelerate:Accelerator.prepare_model
        unwrap_model accelerate:Accelerator.unwrap_model
        wrap_model transformers:Trainer._wrap_model
    """, how="replaced on an object"),
))  # fmt: skip
ATTRIBUTES = {
    "memory and versions of tensors": "_base _cdata _is_view _version",
    "hooks of tensors and optimizers, and backward of functions": (
        "_backward_cls _backward_hooks _post_accumulate_grad_hooks _optimizer_step_post_hooks "
        "_optimizer_step_pre_hooks"),
    "operators": "_overloadname _schema",
    "modules; the last one is False while a module that FSDP has flattened is captured": (
        "_call_impl _flat_weights_names _fsdp_use_orig_params _is_fsdp_managed_module"),
    "what Dynamo notes at functions, in captures, and of settings": (
        "_config _get_modified_vars _is_dirty _suppress_guards_tls _torchdynamo_disable _torchdynamo_orig_callable"),
    "exported programs, and torch.onnx's passes and translations": (
        "_cleanup_registry_based_on_opset_version _graph_module _guards_code _opset_version _register "
        "_rerun_node_after_type_promotion"),
    "Python's lock, in Dynamo": "_at_fork_reinit _is_owned",
    "Apex's optimizers and scalers, opt_einsum's list of shared results": (
        "_amp_lazy_init _amp_stash _has_overflow _post_amp_backward _SHARING_STACK"),
}


def _lost(short: str) -> ImportError:
    name = TABLE[short]
    return ImportError(f"torch {torch.__version__} has no {name.dotted()}, which onnxtrain needs for this: {name.use}. "
                       f"onnxtrain was checked with torch {', '.join(CHECKED[:-1])} and {CHECKED[-1]}")


def _find(path: str) -> tuple[Any, str]:
    """The owner and the last name of a path. Raises ImportError or AttributeError where it is missing."""
    module, names = path.split(":")
    *owners, name = names.split(".") if names else module.split(".")[1:]
    owner: Any = importlib.import_module(module if names else module.split(".")[0])
    for part in owners:
        owner = _part(owner, part)
    _part(owner, name)
    return owner, name


def _part(owner: Any, name: str) -> Any:
    if inspect.ismodule(owner) and not hasattr(owner, name):
        importlib.import_module(f"{owner.__name__}.{name}")
    return getattr(owner, name)


def __getattr__(short: str) -> Any:
    """What a short name of the table stands for; None where a wanted one is missing.

    Raises ImportError where a needed one is missing.
    """
    if short not in TABLE:
        raise AttributeError(f"onnxtrain's table of private names has no {short}")
    found = place(short)
    value = None if found is None else getattr(*found)
    if TABLE[short].how == "read":
        globals()[short] = value
    return value


_places: dict[str, tuple[Any, str] | None] = {}
_left_alone: list[str] = []
_lock = threading.RLock()


def place(short: str) -> tuple[Any, str] | None:
    """The owner and the attribute of a short name; None where a wanted one is missing, or is not as it was when it was
    checked.

    Raises ImportError where a needed one is missing.
    """
    with _lock:  # what another thread has replaced is not looked at once more
        if short not in _places:
            name, state = TABLE[short], status(short)
            if state == "missing" and name.needed:
                raise _lost(short)
            _places[short] = _find(name.path) if state == "known" or name.needed else None
            if _places[short] is None and name.how != "read" and not _is_expected(name, state):
                _left_alone.append(name.dotted())
                _log.info("torch %s is left alone at %s, which is %s: %s", torch.__version__, name.dotted(), state,
                          name.use)
    return _places[short]


def left_alone() -> list[str]:
    """The wanted names of which a replacement was asked for, but not made: this torch has another form, or none."""
    return [*_left_alone]


def status(short: str) -> Literal["known", "unknown", "missing"]:
    """Of a name in this torch, while it is not replaced."""
    name = TABLE[short]
    source = _source(name)
    return "missing" if source is None else "known" if name.how == "read" or source in name.known else "unknown"


def _source(name: Name) -> str | None:
    """The digest of what is replaced; None where the name is missing."""
    try:
        owner, attribute = _find(name.path)
    except (ImportError, AttributeError):
        return None
    value = inspect.getattr_static(owner, attribute, None) or getattr(owner, attribute)
    return "" if name.how == "read" else digest(value)


def _is_expected(name: Name, state: str) -> bool:
    return state == "missing" and torch.__version__.split("+")[0] in name.lacks


def digest(value: Any) -> str:
    """The beginning of the SHA-256 of a function's source, without comments, blank lines and indentation; the kind of
    what is no function in Python.
    """
    value = inspect.unwrap(getattr(value, "__func__", value))
    code = getattr(value, "__code__", None)
    if code is None:
        return type(value).__name__
    try:
        return hashlib.sha256("\n".join(_block(code.co_filename, code.co_firstlineno)).encode()).hexdigest()[:12]
    except OSError:
        return "without source"


def _block(file: str, first: int) -> list[str]:
    """The lines of a function from its first one on. inspect.getsource() takes 10 times as long, and keeps whole files.
    """
    taken: list[str] = []
    begun, indent = False, 0
    with open(file, encoding="utf-8") as lines:
        for line in itertools.islice(lines, first - 1, None):
            text = line.split("#")[0].strip()
            if not text:
                continue
            depth = len(line) - len(line.lstrip())
            indent = indent if taken else depth
            if begun and depth <= indent and not text.startswith((")", "]")):
                break
            begun = begun or text.startswith("def ")
            taken.append(text)
    return taken


def check() -> None:
    """At the import of onnxtrain.ortmodule. Raises ImportError where a torch that was not checked lacks a name that is
    needed.
    """
    if torch.__version__.split("+")[0] in CHECKED:
        return
    for short, name in TABLE.items():
        if name.needed and status(short) == "missing":
            raise _lost(short)
    _log.info("torch %s is none of those that onnxtrain was checked with: %s", torch.__version__, ", ".join(CHECKED))


def doctor() -> tuple[str, bool]:
    """The tables for this torch, with how many names there are of each kind; and whether all are as they were checked.
    """
    rows, counts, is_well = [], dict.fromkeys(("replaced for a while", "replaced for good", "read"), 0), True
    for short, name in TABLE.items():
        state = status(short)
        counts[name.how] += state != "missing"
        is_well = is_well and (state == "known" or _is_expected(name, state))
        said = ("not in this torch" if _is_expected(name, state) else state if state == "missing" else
                "there" if name.how == "read" else f"{state} source {_source(name)}")
        rows.append((name.dotted(), name.how, "needed" if name.needed else "wanted", said, name.use))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join([text.ljust(width) for text, width in zip(row, widths)] + [row[4]]) for row in rows]
    ends = ", ".join(f"{count} {how}" for how, count in counts.items())
    return "\n".join([
        f"Private names that onnxtrain uses, in torch {torch.__version__}:", *lines, ends,
        f"Attributes of objects that it reads: {' '.join(ATTRIBUTES.values())}",
        f"Methods that it replaces on objects: {' '.join(name.dotted() for name in METHODS.values())}"]), is_well
