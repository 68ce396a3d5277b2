"""The C core of onnxtrain: sessions over one exported graph."""

from typing import Any, Callable, ContextManager, Sequence, final

from torch import Generator, Tensor

class UnsupportedError(NotImplementedError):
    """An operator, attribute or dtype that onnxtrain does not have. The message names it and the node."""

@final
class Session:
    """One exported graph. Specialises a program per input signature and keeps an LRU cache of them.

    Args:
        model: serialised ``ModelProto``. Every weight is a graph input; only small constants are initializers.
        programs: how many specialised programs are kept, 1 to 4096.
        device: "cpu" (or ""), "cuda", "cuda:1", or a device of a plugin that was opened. Every tensor is on it.
        torch_random: Dropout nodes draw the same random words as torch's CUDA kernel. This needs a device that reports
            how many blocks that kernel launches (not the CPU), and a graph whose shapes do not depend on values.
        recompute: how much backward may recompute. 0, on the CPU: elementwise operators, norms and attention, at most
            2% of a step's work, and on a device elementwise operators within the groups that read them; 1: matrix
            products too, on every device, at most 20%; 2: at most 45%. The CPU never stores more than a tile of the
            scores of a large vocabulary.
        parameters: one byte per graph input, nonzero for a parameter of the module. A parameter changes only between
            steps, so backward may round it to 16 bits again. Empty: no input is a parameter.
        budget: limit of the slab of each program with a backward, in bytes; at most 1: a fraction of the plan for
            `recompute`; 0: none. If no plan fits, the smallest is used, and a warning names it.
        rows: kinds of unused rows that are not computed on the CPU, as a sum: 1 rows that no Gather, GatherND or Slice
            selects; 2 rows whose label a loss ignores; 4 rows of tokens that the attention mask hides.
        subgraphs: which of those that subgraphs() lists backward runs again: (subgraph, compromise, the first so many,
            or -1 for all).

    Raises:
        ValueError: the model is truncated, malformed or inconsistent; the message names the place.
        UnsupportedError: the model uses an operator that onnxtrain does not have.
    """

    def __init__(self, model: bytes, programs: int = 16, device: str = "", torch_random: bool = False,
                 recompute: int = 0, parameters: bytes = b"", budget: float = 0.0, rows: int = 0,
                 subgraphs: Sequence[tuple[str, bool, int]] = ()) -> None: ...
    @property
    def inputs(self) -> list[tuple[str, str, tuple[int | str, ...]]]:
        """(name, dtype such as "float" or "int64", dims) of every graph input, in order."""
    @property
    def outputs(self) -> list[tuple[str, str, tuple[int | str, ...] | None]]:
        """The same for every graph output; None where the shape is unknown before specialisation."""
    @property
    def random(self) -> bool:
        """Whether the graph draws random numbers, so that forward() needs a seed."""

    def forward(self, tensors: Sequence[Tensor], grad_mask: bytes,
                seed: int | Generator = 0) -> tuple[tuple[Tensor, ...], Run | None]:
        """Runs the forward part.

        Args:
            tensors: one per graph input, in order, on the CPU. Read in place; copied only where not contiguous.
            grad_mask: one byte per graph input: 1 if its gradient is needed, 2 if Updater.backward() will apply it (on
                the CPU).
            seed: key of the counter-based generator of this run's dropout; or a CUDA generator of torch, whose seed and
                offset are read, and whose offset advances as far as in eager.

        Returns:
            The outputs, and the run for backward(), or None if no output depends on a masked input. A sequence is a
            list, and an empty optional is None; backward() counts each item of a list as one output.

        Raises:
            ValueError, TypeError: a tensor does not fit; the message names the input.
            UnsupportedError: an operator has no kernel or no gradient for this case; the message names the node.
        """

    def step(self, tensors: tuple[Tensor, ...], grad_mask: bytes, seed: int | Generator, loss: int, gradient: Tensor,
             update: tuple[Callable[..., Any], tuple[Any, ...]] | None = ...,
             receivers: Sequence[tuple[int, Tensor, bool]] | None = ..., ready: Callable[[int], object] | None = ...,
             reduce: Callable[[], object] | None = ...) -> tuple[tuple[Tensor, ...], Any]:
        """A training step: forward(), backward(), the masked tensors' gradients into their ``.grad``, and an update.

        Args:
            tensors, grad_mask, seed: as in forward().
            loss: which output is differentiated; the others have no gradient.
            gradient: of the loss, of its dtype and shape.
            update: is called at the end: a callable, such as Updater.step, and its arguments.
            receivers, ready: as Run.deliver()'s; those gradients go there and not into ``.grad``.
            reduce: is called between backward and the update, to wait for the collectives that `ready` has begun, for
                one. Not called where no update follows.

        Returns:
            The outputs, and what the update has returned.

        Raises:
            RuntimeError: no output depends on a masked input. Otherwise as forward(), Run.backward() and the update;
            gradients are in ``.grad`` if the update raises.
        """

    def plan(self, shapes: Sequence[Sequence[int]], grad_mask: bytes) -> dict[str, Any]:
        """The memory plan of the program for these input shapes. The program is built but not run.

        Returns:
            slab_bytes and its lower_bound; output_bytes and gradient_bytes, blocks outside the slab; forward_steps;
            recomputed_nodes, recomputed_bytes, and recomputed_share, their share of the step's work by the passes' cost
            model; budget_bytes (0: none); lifetimes, for each storage in the slab (node of the model, operator,
            backward, bytes, first step, last step); steps, for each (node of the model, operator, backward, bytes of
            scratch memory).

        Raises:
            ValueError: shapes do not fit. UnsupportedError: shapes depend on the contents of inputs.
        """

    def stats(self) -> dict[str, Any]:
        """Counts and seconds: programs built, cache hits, build seconds, planned bytes and their lower bound.

        forward_bytes and backward_bytes are the most bytes live in each phase; kept_bytes live from one to the other.
        recomputed_nodes run again in backward to save recomputed_bytes; they add recomputed_share to the step's work.
        budget_bytes is 0 without a budget. With data-dependent shapes, probes_built counts value probes, and probe_runs
        their runs. packed_nodes compute some rows only: selected_rows of selected_rows_of, label_rows of label_rows_of
        whose label is not ignored, key_rows of key_rows_of that attention can see.
        """

    def text(self, stage: str = "loaded") -> str:
        """The graph as ONNX-style text: "loaded", or "program" for the latest specialised one."""

    def save(self, stage: str = "execution_model") -> bytes:
        """A serialised ModelProto: "post_processed" (as loaded), "optimized_pre_grad" (sizes set, folded), "optimized"
        (with its backward part), "execution_model" (as it runs); all but the first describe the latest program.

        Raises:
            ValueError: another stage. RuntimeError: no program has been built yet.
        """

    def kernels(self) -> list[tuple[str, str, bool]]:
        """(node, kernel, backward) for every step of the latest program."""

    def subgraphs(self) -> list[tuple[str, bool, int, int, int]]:
        """What the latest program could run again in backward, level and budget apart.

        Returns:
            (subgraph, compromise, frequency, applied, bytes): operators by name, in order, each followed by "+";
            whether the narrower operand of a Cast is kept instead; how often it occurs, and how often it runs again;
            bytes that are kept where none does.
        """

    def graphs(self) -> list[tuple[str, int, int, str]]:
        """(phase, captures, replays, reason) of the latest program on a device: why the last call was not a replay, or
        an empty reason if it was; an empty list on the CPU."""

    def timeline(self) -> list[tuple[str, str, str, str, bool, float, float]]:
        """(node, operator, kernel, shape of the result, backward, start, end) for every step of the latest program.

        The times are of its latest run since set_timing(True), in seconds of the monotonic clock; zero before. A
        backward step has the name of the node that it differentiates."""

    def timings(self) -> list[tuple[bool, int, int, float, float, float,
                                    list[tuple[str, str, str, str, int, bool, float, float]]]]:
        """Every forward and backward since set_timing(True, True) that an earlier call has not returned.

        Returns:
            (backward, lost, thread, start, end, seconds in the callback that receives gradients, steps); of each step
            what timeline() says, with the bytes of its operands and results before `backward`. The core keeps 32 MiB
            that were not read. Where `lost` is not 0, the item stands for so many runs before that.
        """

@final
class Run:
    """A forward whose backward has not run yet; it owns the activations."""

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
        """The graph inputs and outputs that backward() needs.

        With `call`, any object, the run holds it and the inputs until forget(): ``again()`` reads these inputs.

        Raises:
            IndexError, ValueError: there are fewer than the graph has.
        """

    @property
    def inputs(self) -> tuple[Tensor, ...] | None:
        """The graph inputs that saved() holds."""
    @property
    def call(self) -> Any:
        """The object that was given to saved(), or None."""
    @property
    def over(self) -> bool:
        """Whether backward() or release() has been called."""

    def changed(self) -> list[int]:
        """Indices of held inputs that were changed in place, or whose ``.data`` was assigned, since saved().

        Raises:
            RuntimeError: no inputs are held.
        """

    def again(self) -> None:
        """Runs forward once more on the held inputs, with the same random numbers, so that backward() can run again.

        Raises:
            RuntimeError: no inputs are held. ValueError, TypeError: one has another dtype or shape now.
        """

    def forget(self) -> None:
        """Releases the inputs and the object that saved() holds."""

    @property
    def applied(self) -> tuple[int, ...]:
        """Indices of the graph inputs whose gradients Updater.backward() applies, and deliver() delivers, in that
        order: inputs with grad_mask 2 that have a gradient. A gradient that is itself an input of backward is returned
        instead.
        """

    def backward(self, saved: Sequence[Tensor], grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Runs the backward part once.

        Args:
            saved: the tensors named by saved_inputs, then those named by saved_outputs.
            grads: gradient of each graph output; None is zero.

        Returns:
            One gradient per graph input; None where grad_mask was 0 or no gradient flows.

        Raises:
            RuntimeError: called a second time without again(), or after release().
            ValueError: there are gradients to be applied.
        """

    def deliver(self, saved: Sequence[Tensor], grads: Sequence[Tensor | None],
                receivers: Sequence[tuple[int, Tensor, bool]],
                ready: Callable[[int], object] | None = ...) -> tuple[Tensor | None, ...]:
        """Runs the backward part once, as backward() does, and writes gradients to tensors as soon as they are final.
        A gradient that is itself an input of backward is written at the end.

        Args:
            saved, grads: as backward()'s.
            receivers: (input, tensor, add) each: index of a graph input; a contiguous tensor of its dtype and shape on
                the CPU; whether the gradient is added to what is there (float32 and float64 alone) or overwrites it.
                The gradient of an input with grad_mask 2 that has no receiver is discarded.
            ready: is told the index of each input that has a receiver and a gradient, after its gradient is there; on
                the thread that runs backward. What it raises ends backward.

        Returns:
            As backward(); None for inputs that have a receiver.

        Raises:
            RuntimeError: called a second time without again(), or after release().
            ValueError: a receiver does not fit, comes twice, or shares memory with something that backward reads;
                nothing has run then.
        """

    def release(self) -> None:
        """Releases the activations. Further calls do nothing."""

@final
class Watch:
    """Checks whether containers still hold the same objects, by identity.

    Args:
        entries: (container, keys, values) each. values are, for a dict with a tuple of keys, their values, `absent` for
            a missing key; for a dict with keys None, (key, value, key, value ...) of all items; for a list, its items;
            for a set, an equal set.
        absent: the value that stands for a missing key.

    Raises:
        TypeError: an entry of another form.
    """

    def __init__(self, entries: Sequence[tuple[Any, tuple[Any, ...] | None, Any]], absent: Any) -> None: ...
    def changed(self) -> int:
        """Index of the first entry that differs, or -1."""

__version__: str
ISA: str  # the instruction set of the kernels: "avx512", "avx2" or "plain"

def build_info() -> dict[str, Any]:
    """Properties of the build and the machine: version, operators, threads, dlpack_exchange, isa, gemm (backends),
    split_products (whether float32 products may be sums of bfloat16 ones), bfloat16_products."""

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
    """Disables kernels by name, or by "Op:kernel" for one operator, in programs that are built later. Tests use it to
    compare each kernel with the reference."""

def disable_passes(names: Sequence[str]) -> None:
    """Skips optional passes by name in programs that are built later, like ONNXTRAIN_DISABLE=name,... at the start.

    "+name" runs a pass that is for devices (fuse_gelu) on the CPU too. "+schedule" takes another order of steps even
    if it saves no memory, "+pack_rows" leaves rows out of a graph however small, and "+recompute" plans levels 1 and 2
    of a step however small.
    """

def set_flush_denormals(on: bool) -> None:
    """Sets whether programs treat denormal floats as zero, on their threads only; ONNXTRAIN_FLUSH_DENORMALS=0 turns
    this off when the process starts."""

def set_deterministic(on: bool) -> None:
    """Chooses the kernels of later programs, and the algorithms of cuBLASLt and cuDNN, by rule, not by measurement."""

def set_matmul_precision(precision: str, everywhere: bool = False) -> None:
    """Float32 products of programs built from now on: "highest" exactly, "medium" by bfloat16 operands where the
    processor has such products and the product is large, "high" by operands of two bfloat16 parts each where it has
    tiles (AMX). With `everywhere` (for tests) at any size, and "medium" on any processor.

    Raises:
        ValueError: another name.
    """

def recompute_everywhere(on: bool) -> None:
    """For tests: programs that are built later recompute every node that saves bytes, at any cost."""

def open_plugin(path: str | None = None) -> dict[str, Any]:
    """Opens a library with devices; None: the CUDA library beside the extension. Later calls return the same.

    Returns:
        ``about``; ``missing``, libraries, and ``left_out``, why a GPU cannot be used (str or None); ``devices``: names
        for Session.

    Raises:
        OSError: the library cannot be opened, or the machine lacks what it needs.
    """

def device_operators(device: str) -> list[tuple[str, str, list[str]]]:
    """Domain, name and kernels of every operator of a device; empty for the CPU, see operators()."""

def set_graphs(on: bool) -> None:
    """Sets whether a device captures a phase after some calls and replays it as one graph. The default is True."""

def set_tf32(products: bool, convolutions: bool) -> None:
    """Sets whether float32 products and convolutions on CUDA may use TF32, in steps from now on."""

def set_timing(on: bool, record: bool = False) -> None:
    """Sets whether runs note the begin and end of each step for Session.timeline(), and record them for
    Session.timings(). Turning recording off drops what was not read."""

def set_ranges(make: Callable[[str], ContextManager[Any]] | None) -> None:
    """Sets what is made for each step of a run, by name, and entered while the step runs; None: nothing."""

def set_log_level(level: int) -> None:
    """Sets the lowest `logging` level for which the core makes log lines."""

def measured_products() -> str:
    """Which kernel won for each kind of matrix product, as text of one line each; remember_products() reads it in
    another process on the same machine.

    Raises:
        MemoryError: for the text.
    """

def remember_products(text: str) -> int:
    """Imports the text of measured_products() from another process, so that these kernels do not compete again.

    Skips lines that do not parse, or whose kind is known already. A wrong text cannot make a product wrong, only slow.

    Returns:
        The number of new entries.

    Raises:
        ValueError: a null character.
    """

@final
class Updater:
    """One optimizer's update of all its parameters in one call; onnxtrain/optim/_base.py drives it."""

    def __init__(self, rule: str, name: str) -> None:
        """
        Args:
            rule: "adam", "lamb", "sgd", "adagrad" or "lion".
            name: of the optimizer, for messages.
        """

    def walks(self) -> tuple[int, int]:
        """
        Returns:
            The number of steps, and how many of them took the fast path: plain dense tensors at the same addresses as
            in the step before. The fast path runs no Python code, counts no references and holds the GIL.
        """

    def step(self, groups: list[dict[str, Any]], hyper: list[tuple[float, ...]], state: dict[Tensor, Any],
             prepare: Callable[[Tensor, int], bool], clip: tuple[float, float, bool], unscale: float, seed: int,
             device: str = "", scalars: tuple[Tensor | None, ...] | None = None) -> float | None:
        """Updates every parameter that has a gradient.

        Args:
            groups: with "params".
            hyper: for each group its sign, flags (1 master weights, 2 stochastic rounding) and the rule's numbers.
            state: parameter to dict of state tensors.
            prepare: completes the state of a parameter of a group; returns whether it had none before.
            clip: max_norm, epsilon and only_finite. Gradients are multiplied by max_norm / (norm + epsilon) where that
                is less than 1; a negative max_norm: no clipping, and no norm. only_finite: nothing is updated, and no
                step counted, if the norm is not finite.
            unscale: multiplies the gradients before that.
            seed: of stochastic rounding.
            device: where all tensors are; "": on the CPU.
            scalars: for a device, float32 tensors there, or None: found_inf; the factor of the gradients (instead of
                `unscale`); the tensor that receives the norm; for each group its learning rate, instead of the first
                number of its rule.

        Returns:
            The norm of all gradients times `unscale`; None where max_norm is negative, and for a device.

        Raises:
            RuntimeError: a gradient is sparse.
            TypeError, ValueError: a tensor is of a kind that is not supported, or shares memory with another.
            Nothing was updated then.
        """

    def backward(self, run: Run, saved: Sequence[Tensor], grads: Sequence[Tensor | None],
                 groups: list[dict[str, Any]], hyper: list[tuple[float, ...]], state: dict[Tensor, Any],
                 prepare: Callable[[Tensor, int], bool], seed: int,
                 targets: list[tuple[int, int, Tensor]], done: bytearray) -> tuple[Tensor | None, ...]:
        """Run.backward() that updates each target as soon as its gradient is final and no later node reads the target.

        Args:
            run, saved, grads: as there.
            groups, hyper, state, prepare, seed: as in step().
            targets: an input of the graph among run.applied, the parameter's position over all groups, and itself.
                Gradients of other inputs with grad_mask 2 are dropped.
            done: a byte for each target; it becomes 1 when the target has been updated, also if the call then raises.

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
    """Opens _mpi.so, which initialises MPI if needed and waits for the other processes; later calls only return.

    Returns:
        ``about`` (the library's version), ``rank``, ``size``, ``local_rank``, ``local_size``.

    Raises:
        OSError: this build has no _mpi.so, or MPI cannot be initialised.
    """

def mpi_all_reduce(tensor: Tensor) -> None:
    """Replaces a contiguous CPU tensor by the sum over all processes.

    All processes must make the same collective calls in the same order. A call waits without the GIL.

    Raises:
        RuntimeError: a process has ended, or an earlier collective has failed.
        TypeError, ValueError: tensors do not fit; nothing was sent.
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
    """Waits until all processes have called it, and finalizes MPI if mpi_open() initialised it. If a collective has
    failed, it ends all processes, including this one.
    """

def comm_about(device: str) -> str:
    """Name and version of the library that has collectives over memory of this device, as "NCCL 2.28.9".

    Raises:
        UnsupportedError: the device has none, or the library is missing.
    """

def comm_id(device: str) -> bytes:
    """What one process makes and tells the others before all call comm_open()."""

def comm_open(device: str, id: bytes, rank: int, size: int) -> object:
    """A communicator of this device; waits for the other processes.

    Raises:
        RuntimeError: the library has failed.
        ValueError: an id of another length.
    """

def comm_enqueue(comm: object, kind: str, source: Tensor, target: Tensor, root: int = 0) -> None:
    """A collective on torch's current stream of the device; nothing waits for it. All processes must make the same
    calls in the same order.

    Args:
        kind: "all_reduce" or "broadcast" (n to n elements, source and target may be one tensor), "reduce_scatter"
            (size * n to n), "all_gather" (n to size * n).

    Raises:
        UnsupportedError: the library has not this dtype; the caller captures the stream.
        RuntimeError: the library has failed; the communicator is closed.
        TypeError, ValueError: tensors do not fit, or are on another device; nothing was enqueued.
    """

def comm_check(comm: object) -> None:
    """Raises RuntimeError where a collective that was enqueued before has failed."""

def comm_close(comm: object, failed: bool) -> None:
    """Ends a communicator. After a failure, what is under way is given up."""

def signature(args: tuple[Any, ...]) -> bytes | None:
    """Equal bytes for arguments that are all plain torch.Tensors of equal dtypes, ranks and kinds of device.

    None if an argument is anything else (a parameter, a subclass, sparse, nested), or if this torch has another layout.

    Raises:
        TypeError: args is no tuple.
    """

def gather(sources: list[tuple[dict[str, Any] | None, Any]], leaves: Sequence[Any],
           grad_enabled: bool) -> tuple[tuple[Any, ...], bytes]:
    """The current tensors of a graph's inputs, and one byte for each: whether it needs a gradient.

    Args:
        sources: (dict, name in it), or (None, index of a leaf).
        leaves: arguments of the call.
        grad_enabled: if False, no input needs a gradient.

    Raises:
        KeyError, AttributeError: a name is missing, or its value is not a tensor.
        IndexError: a leaf is missing.
        TypeError: a source has another form.
    """

def grad_tables() -> Any:
    """The tables of tensors that grads_on() keeps on a device and uploads again when the tensors change."""

def grads_on(tables: Any, device: str, what: str, sources: Sequence[Tensor], targets: Sequence[Tensor] | None,
             found_inf: Tensor | None, inv_scale: Tensor | None, out: Tensor | None, max_norm: float,
             keep: float) -> None:
    """Launches over dense float tensors on a device; nothing waits.

    Args:
        tables: of grad_tables().
        device: its name.
        what: "norm": the norm of all sources together times ``inv_scale``, to ``out`` (one float64). "clip": the same,
            and sources are multiplied by ``inv_scale * min(1, max_norm / (norm + 1e-6))``. "unscale": sources are
            multiplied by ``inv_scale``, and
            ``found_inf`` becomes 1 where one is not finite. "sums": of squares, one float64 per source, to ``out``.
            "scale": ``target = source * inv_scale + keep * target``, and ``found_inf`` becomes 1 where a result is not
            finite.
        targets: of "scale", each with its source's shape and order of elements; else None.
        found_inf, inv_scale: one float32 on the device, or None.
        out: float64 on the device, or None.

    Raises:
        TypeError: a tensor is on another device, not of a float dtype, or strided.
        ValueError: targets share memory, or a shape differs.
        UnsupportedError: the caller captures the stream, and the tensors are not those of the last call.
    """

def scale_tensors(sources: Sequence[Tensor], targets: Sequence[Tensor], factor: float, keep: float) -> bool:
    """``target = source * factor + target * keep`` in one pass; a target may be its source.

    Returns:
        Whether all sources were finite.

    Raises:
        TypeError: a tensor is no dense CPU tensor of a float dtype.
        ValueError: shapes differ, or tensors share memory.
    """
