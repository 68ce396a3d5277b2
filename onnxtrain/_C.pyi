"""The C core of onnxtrain: sessions over one exported graph."""

from typing import Any, Callable, Sequence

from torch import Generator, Tensor

class UnsupportedError(NotImplementedError):
    """An operator, attribute or dtype that onnxtrain does not have. The message names it and the node."""

class Session:
    """One exported graph. Specialises a program per input signature and keeps an LRU cache of them.

    Args:
        model: serialised ``ModelProto``. Every weight is a graph input; only small constants are initializers.
        programs: how many specialised programs are kept, 1 to 4096.
        device: "cpu" (or ""), "cuda", "cuda:1", or a device of a plugin that was opened. Every tensor is on it.
        torch_random: Dropout nodes draw the words that torch's CUDA kernel draws at their place, where the device tells
        how many
            blocks that launches (not the CPU), and no contents decide about the graph.
        recompute: what backward may compute again instead of keeping it. 0, on the CPU: elementwise operators, norms
            and attention, at most 2% of a step's work; 1: products too, on every device, at most 20%; 2: at most 45%.
            On the CPU of the scores of a large vocabulary never more than a tile exists.
        parameters: one byte per graph input, not 0 for a module's parameter: it changes between steps alone, so that
            backward may round it to 16 bits again instead of keeping what forward rounded it to. Empty: none is one.
        budget: bytes that the slab of each program with a backward stays within; at most 1: a fraction of what
            `recompute` plans; 0: none. Where no plan is that small, the smallest is used, and a warning names it.
        rows: which rows that nobody reads are left out, on the CPU, as a sum: 1 those that a Gather, GatherND or Slice
            does not select, 2 those whose label a loss ignores, 4 those of tokens that attention's mask hides.

    Raises:
        ValueError: the model is truncated, malformed or inconsistent; the message names the place.
        UnsupportedError: the model uses an operator that onnxtrain does not have.
    """

    def __init__(self, model: bytes, programs: int = 16, device: str = "", torch_random: bool = False,
                 recompute: int = 0, parameters: bytes = b"", budget: float = 0.0, rows: int = 0) -> None: ...
    @property
    def inputs(self) -> list[tuple[str, str, tuple[int | str, ...]]]:
        """(name, dtype such as "float" or "int64", dims) of every graph input, in order."""
    @property
    def outputs(self) -> list[tuple[str, str, tuple[int | str, ...] | None]]:
        """The same for every graph output; None where the shape is unknown before specialisation."""
    @property
    def random(self) -> bool:
        """Whether the graph draws random numbers, so that forward() wants a seed."""

    def forward(self, tensors: Sequence[Tensor], grad_mask: bytes,
                seed: int | Generator = 0) -> tuple[tuple[Tensor, ...], Run | None]:
        """Runs the forward part.

        Args:
            tensors: one per graph input, in order, on the CPU. Read in place; copied only where not contiguous.
            grad_mask: one byte per graph input, 1 where its gradient will be wanted, 2 where Updater.backward() will
                apply it (on the CPU).
            seed: key of the counter-based generator that dropout uses in this run; or a generator of torch's for CUDA,
            whose seed
                and offset are read, and whose offset is moved on as far as eager's dropout would move it.

        Returns:
            The outputs, and the run to call backward() on; None where no output depends on a masked input. An output of
            the graph that is a sequence comes as a list, an optional without element as None; backward() counts the
            items of lists as outputs of their own.

        Raises:
            ValueError, TypeError: a tensor does not fit; the message names the input.
            UnsupportedError: an operator has no kernel or no gradient for this case; the message names the node.
        """

    def infer(self) -> dict[str, tuple[str, tuple[int | str | None, ...] | None]]:
        """Shape inference with symbolic dims, for every operator: value name -> (dtype, dims), of inputs, node outputs
        and
        graph outputs. A dim is a size, an expression of the inputs' symbols such as "n" or "2*n + 1", or None where
        neither fits; dims are None where the rank, or anything, depends on contents, and for sequences. Values of which
        nothing could be told are left out.

        Raises:
            ValueError, UnsupportedError: the model fails at every size that was tried; the message names the node.
        """

    def plan(self, shapes: Sequence[Sequence[int]], grad_mask: bytes) -> dict[str, Any]:
        """The memory plan of the program of these input shapes, which is built and does not run.

        Returns:
            slab_bytes and its lower_bound; output_bytes and gradient_bytes, blocks outside it; forward_steps;
            recomputed_nodes, recomputed_bytes, and recomputed_share, what they add to the step's work by the model of
            the passes; budget_bytes (0: none); lifetimes, of each storage in the slab (node of the model, operator,
            backward, bytes, first step, last step); steps, of each (node of the model, operator, backward, bytes of
            scratch memory).

        Raises:
            ValueError: shapes do not fit. UnsupportedError: shapes depend on the contents of inputs.
        """

    def stats(self) -> dict[str, Any]:
        """Counts and seconds: programs built, cache hits, build seconds, planned bytes and their lower bound;
        forward_bytes, kept_bytes and backward_bytes, at most live in each phase and what lives from one to the other;
        recomputed_nodes
        run a second time in backward, so that recomputed_bytes need not be kept for it; they add recomputed_share of
        the step's work; budget_bytes is 0 without a budget. Where shapes
        depend on contents, probe_runs is how often programs ran that compute those contents, and probes_built how many.
        packed_nodes compute some rows only: selected_rows of selected_rows_of, label_rows of label_rows_of whose label
        counts, key_rows of key_rows_of that attention sees.
        """

    def text(self, stage: str = "loaded") -> str:
        """The graph as ONNX-style text: "loaded", or "program" for the latest specialised one."""

    def save(self, stage: str = "execution_model") -> bytes:
        """A serialised ModelProto: "post_processed" (as loaded), "optimized_pre_grad" (sizes set, folded), "optimized"
        (with
        its backward part), "execution_model" (what runs); all but the first of the latest program.

        Raises:
            ValueError: another stage. RuntimeError: no program has been built yet.
        """

    def kernels(self) -> list[tuple[str, str, bool]]:
        """(node, kernel, backward) for every step of the latest program."""

    def graphs(self) -> list[tuple[str, int, int, str]]:
        """(phase, how often recorded, how often replayed, why not the last time) of the latest program on a device: an
        empty
        reason where the last call was a replay; an empty list on the CPU."""

    def timeline(self) -> list[tuple[str, str, str, str, bool, float, float]]:
        """(node, operator, kernel, shape of the result, backward, start, end) for every step of the latest program,
        from
        its latest run since set_timing(True); seconds of the monotonic clock, zero before. A backward step has the name
        of the node that it differentiates."""

class Run:
    """A forward that waits for its backward; owns the activations until then."""

    @property
    def saved_inputs(self) -> tuple[int, ...]:
        """Indices of the graph inputs that backward reads."""
    @property
    def saved_outputs(self) -> tuple[int, ...]:
        """Indices of the graph outputs that backward reads."""
    @property
    def differentiable(self) -> bytes:
        """One byte per graph output, 1 where it depends on a masked input."""

    def saved(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], call: Any = ...) -> tuple[Tensor, ...]:
        """Of all graph inputs and outputs those that backward() wants back.

        With `call`, any object, the run holds it and the inputs until forget(): ``again()`` reads these inputs.

        Raises:
            IndexError, ValueError: there are fewer than the graph has.
        """

    @property
    def inputs(self) -> tuple[Tensor, ...] | None:
        """The graph inputs that saved() holds."""
    @property
    def call(self) -> Any:
        """What saved() holds beside them, or None."""
    @property
    def over(self) -> bool:
        """Whether backward() has run, or release()."""

    def changed(self) -> list[int]:
        """Indices of held inputs that were changed in place since saved().

        Raises:
            RuntimeError: no inputs are held.
        """

    def again(self) -> None:
        """Runs forward once more on the held inputs, with the same random numbers, so that backward() can run again.

        Raises:
            RuntimeError: no inputs are held. ValueError, TypeError: one has another dtype or shape now.
        """

    def forget(self) -> None:
        """Lets go of what saved() holds."""

    @property
    def applied(self) -> tuple[int, ...]:
        """Indices of the graph inputs whose gradients Updater.backward() applies, in that order: those with grad_mask 2
        that a gradient flows to; not where the gradient is itself an input of backward, which comes out."""

    def backward(self, saved: Sequence[Tensor], grads: Sequence[Tensor | None],
                 donated: Sequence[int] = ()) -> tuple[Tensor | None, ...]:
        """Runs the backward part once.

        Args:
            saved: the tensors named by saved_inputs, then those named by saved_outputs.
            grads: gradient of each graph output; None is zero.
            donated: indices of graph inputs that nobody else reads, now or later. Where the plan allows it the gradient
                of such an input is computed over it, on the CPU, and the saved tensor itself is returned. Where
                backward fails it may be half overwritten.

        Returns:
            One gradient per graph input; None where grad_mask was 0 or no gradient flows.

        Raises:
            IndexError: an item of donated is no graph input.
            RuntimeError: called a second time without again(), or after release().
            ValueError: there are gradients to be applied.
        """

    def release(self) -> None:
        """Gives the activations back. Harmless when repeated."""

class Watch:
    """Whether containers still hold the very objects that they held; compares pointers.

    Args:
        entries: (container, keys, values) each. A dict with a tuple of keys: their values, `absent` where there is
        none; a
            dict with keys None: (key, value, key, value ...) of all of it; a list: its items; a set: an equal set.
        absent: what stands for a key that is not there.

    Raises:
        TypeError: an entry of another form.
    """

    def __init__(self, entries: Sequence[tuple[Any, tuple[Any, ...] | None, Any]], absent: Any) -> None: ...
    def changed(self) -> int:
        """Index of the first entry that differs, or -1."""

def build_info() -> dict[str, Any]:
    """What this build and this machine have: version, operators, threads, dlpack_exchange, isa,
    gemm (provider names).
    """

def operators() -> list[dict[str, Any]]:
    """The operator registry: domain, name, since, grad (bool: has a rule), no_grad (bool: nothing flows), containers
    (bool: takes sequences or optionals), kernels (names), view (bool), expands (bool: stands for
    others), and attributes: those that the operator takes, as "axis:i perm:I" (i int, f float, s string, t tensor, g
    graph, capitals for lists); None where it does not say."""

def live_blocks() -> int:
    """Heap blocks of the core that are now allocated (for leak tests)."""

def fail_allocation_after(countdown: int) -> bool:
    """Test hook: makes the allocation `countdown` calls from now fail, and all later ones; negative turns it off.
    Returns whether a failure was injected since the last call."""

def disable_kernels(names: Sequence[str]) -> None:
    """Kernels with these names, or "Op:kernel" for the nodes of one operator, decline from now on (tests compare each
    kernel with the reference). Programs already built keep theirs."""

def disable_passes(names: Sequence[str]) -> None:
    """Optional passes with these names are skipped from now on, as by ONNXTRAIN_DISABLE=name,... when the process
    starts.
    Programs already built stay as they are. "+name" has a pass that is for devices (fuse_gelu) run on the CPU as well,
    and "+schedule" another order of steps taken whatever it gains.
    """

def set_flush_denormals(on: bool) -> None:
    """Whether denormal floats count as zero while programs run, on their threads alone; ONNXTRAIN_FLUSH_DENORMALS=0
    turns it off when the process starts."""

def set_deterministic(on: bool) -> None:
    """Kernels of programs that are asked for from now on are chosen by rule, not by measurement."""

def set_matmul_precision(precision: str, everywhere: bool = False) -> None:
    """Float32 products of programs built from now on: "highest" exactly, "medium" by bfloat16 operands where the
    processor has such products and the product is large, "high" by operands of two bfloat16 parts each where it has
    tiles (AMX). With `everywhere` (for tests) at any size, and "medium" on any processor.

    Raises:
        ValueError: another name.
    """

def recompute_everywhere(on: bool) -> None:
    """For tests: programs built from now on recompute whatever saves bytes,
    however small they are and whatever it costs.
    """

def open_plugin(path: str | None = None) -> dict[str, Any]:
    """Opens a library with devices, None: the CUDA one beside the extension; once, later calls answer the same.

    Returns:
        ``about`` and ``missing`` (str or None), ``devices``, names that Session takes.

    Raises:
        OSError: it cannot be opened, or the machine has not what it needs.
    """

def device_operators(device: str) -> list[tuple[str, str, list[str]]]:
    """Domain, name and kernels of every operator that a device has; none for the CPU, whose are in operators()."""

def set_graphs(on: bool) -> None:
    """Whether a device records a phase after some calls and replays it as one graph. On at first."""

def set_tf32(products: bool, convolutions: bool) -> None:
    """Whether products and convolutions of float32 on CUDA may use TF32, in programs built from now on."""

def set_timing(on: bool) -> None:
    """Whether runs note when each of their steps begins and ends, for Session.timeline()."""

def set_log_level(level: int) -> None:
    """Lines of the core below this `logging` level are not made at all."""

def measure_gemm(provider: str, trans_a: bool, trans_b: bool, m: int, n: int, k: int) -> float | None:
    """Seconds of the fastest of a few matrix products; None where the implementation is not available.

    Names: "torch", "per_thread", "onednn", "reference"; of oneDNN's primitive "matmul", "bfloat16", "bfloat16 to
    float32"; of the native GEMM "native", "bf16x3", "native bfloat16", "native bfloat16 to float32".
    """

def measured_products() -> str:
    """Which way each kind of product goes, as far as this process has measured or was told it: a line for each, for
    remember_products() in another process on the same machine.

    Raises:
        MemoryError: for the text.
    """

def remember_products(text: str) -> int:
    """Takes what measured_products() said in another process, so that these kinds are not measured again.

    Lines that do not parse, that name what is not here, or whose kind is known already are passed over. No text makes a
    product wrong, only slow.

    Returns:
        How many kinds it learnt.

    Raises:
        ValueError: a null character.
    """

class Updater:
    """One optimizer's update of all its parameters in one call; onnxtrain/optim/_engine.py drives it."""

    def __init__(self, rule: str, name: str) -> None:
        """
        Args:
            rule: "adam", "lamb", "sgd", "adagrad" or "lion".
            name: of the optimizer, for messages.
        """

    def walks(self) -> tuple[int, int]:
        """
        Returns:
            How many steps there were, and how many of them found nothing but plain dense tensors where the step before
            had them: those run no Python code, count no references and keep the GIL.
        """

    def step(self, groups: list[dict], hyper: list[tuple[float, ...]], state: dict,
             prepare: Callable[[Tensor, int], bool], max_norm: float, unscale: float, seed: int, device: str = "",
             scalars: tuple[Tensor | None, ...] | None = None) -> float | None:
        """Updates every parameter that has a gradient.

        Args:
            groups: with "params".
            hyper: for each group its sign, flags (1 master weights, 2 stochastic rounding) and the rule's numbers.
            state: parameter to dict of state tensors.
            prepare: completes the state of a parameter of a group; whether there was none before.
            max_norm: clips the gradients together; negative: neither clipped nor measured.
            unscale: multiplies the gradients before that.
            seed: of stochastic rounding.
            device: where all tensors are; "": on the CPU.
            scalars: for a device, float32 numbers there or None: found_inf, what gradients are multiplied by (in place
            of
                `unscale`), where the norm goes to, and for each group its rate in place of the first number of its
                rule.

        Returns:
            The norm of all gradients times `unscale`; None where max_norm is negative, and for a device.

        Raises:
            RuntimeError: a gradient is sparse.
            TypeError, ValueError: a tensor is of a kind that is not supported, or shares memory with another.
            Nothing was updated then.
        """

    def backward(self, run: Run, saved: Sequence[Tensor], grads: Sequence[Tensor | None], groups: list[dict],
                 hyper: list[tuple[float, ...]], state: dict, prepare: Callable[[Tensor, int], bool], seed: int,
                 targets: list[tuple[int, int, Tensor]], done: bytearray) -> tuple[Tensor | None, ...]:
        """Run.backward() that updates each target as soon as its gradient is final and backward reads it no more.

        Args:
            run, saved, grads: as there.
            groups, hyper, state, prepare, seed: as in step().
            targets: an input of the graph among run.applied, the parameter's position over all groups, and itself.
                Gradients of other inputs with grad_mask 2 are dropped.
            done: a byte for each target, which becomes 1 when it has been updated; right also where this raises.

        Returns:
            One gradient per graph input; None where it was applied or none flows.

        Raises:
            RuntimeError: a parameter has a ``.grad`` or is not where its position says; the run is over.
            TypeError, ValueError: as step(); or backward reads memory that is updated. Nothing was updated then.
        """

def sums_of_squares(tensors: Sequence[Tensor]) -> list[float]:
    """The sum of squares of each tensor, in double: finite exactly where all elements are (but for float64 past 1e154).

    Raises:
        TypeError: a tensor is no dense CPU tensor of a float dtype.
    """

def mpi_open() -> dict[str, Any]:
    """Opens _mpi.so, which initialises MPI unless somebody has, and meets the other processes; later calls only tell.

    Returns:
        ``about`` (the library's version), ``rank``, ``size``, ``local_rank``, ``local_size``.

    Raises:
        OSError: this build has no _mpi.so, or MPI cannot be initialised.
    """

def mpi_all_reduce(tensor: Tensor) -> None:
    """Replaces a contiguous tensor of the CPU by the sum of all processes'. So do all calls: all processes make the
    same ones in the same order, and they wait without the GIL.

    Raises:
        RuntimeError: a process has ended, or an earlier collective has failed. TypeError, ValueError: tensors do not
            fit; nothing was sent then.
    """

def mpi_reduce_scatter(own: Tensor, whole: Tensor) -> None:
    """own (n,) = this process's part of the sum of all whole (size * n,)."""

def mpi_all_gather(whole: Tensor, own: Tensor) -> None:
    """whole (size * n,) = own (n,) of all processes, in the order of ranks."""

def mpi_broadcast(tensor: Tensor, root: int) -> None:
    """Replaces a tensor by that of process root."""

def mpi_barrier() -> None:
    """Waits for all processes."""

def mpi_leave() -> None:
    """Waits until all processes have called it, and ends MPI where mpi_open() began it. Where a collective has failed
    it ends all processes, this one too.
    """

def signature(args: tuple[Any, ...]) -> bytes | None:
    """Equal bytes for arguments that are all plain torch.Tensors of equal dtypes, ranks and kinds of device.

    None where one is anything else (a parameter, a subclass, sparse, nested), or where torch cannot be asked this way.

    Raises:
        TypeError: args is no tuple.
    """

def gather(sources: list[tuple[dict[str, Any] | None, Any]], leaves: Sequence[Any],
           grad_enabled: bool) -> tuple[tuple[Any, ...], bytes]:
    """The tensors that a graph's inputs are now, and one byte for each: whether it wants a gradient.

    Args:
        sources: (dict, name in it), or (None, index of a leaf).
        leaves: arguments of the call.
        grad_enabled: where False, none wants one.

    Raises:
        KeyError, AttributeError: a name is gone, or what it stands for is no tensor now.
        IndexError: there is no such leaf.
        TypeError: a source is neither.
    """

def grad_tables() -> Any:
    """What grads_on() keeps on a device from call to call: tables of the tensors,
    uploaded where they are not those of the last one.
    """

def grads_on(tables: Any, device: str, what: str, sources: Sequence[Tensor], targets: Sequence[Tensor] | None,
             found_inf: Tensor | None, inv_scale: Tensor | None, out: Tensor | None, max_norm: float,
             keep: float) -> None:
    """Launches over dense float tensors on a device; nothing waits.

    Args:
        tables: of grad_tables().
        device: its name.
        what: "norm": of all sources together times ``inv_scale``, to ``out`` (one float64). "clip": the same, and
        sources are
            multiplied by ``inv_scale * min(1, max_norm / (norm + 1e-6))``. "unscale": by ``inv_scale``, and
            ``found_inf`` becomes 1 where one is not finite. "sums": of squares, one float64 per source, to ``out``.
            "scale": ``target = source * inv_scale + keep * target``, and ``found_inf`` becomes 1 where a result is not
            finite.
        targets: of "scale", each with its source's shape and order of elements; else None.
        found_inf, inv_scale: one float32 on the device, or None.
        out: float64 on the device, or None.

    Raises:
        TypeError: a tensor is not there, not of a float dtype, or strided.
        ValueError: targets share memory, or a shape differs.
        UnsupportedError: the stream is recorded, and the tensors are not those of the last call.
    """

def scale_tensors(sources: Sequence[Tensor], targets: Sequence[Tensor], factor: float, keep: float) -> bool:
    """``target = source * factor + target * keep`` in one pass; a target may be its source.

    Returns:
        Whether all sources were finite.

    Raises:
        TypeError: a tensor is no dense CPU tensor of a float dtype.
        ValueError: shapes differ, or tensors share memory.
    """
