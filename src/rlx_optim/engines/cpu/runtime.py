"""Machine code from LLVM IR, in memory alone, and the threads that run it.

`compile_module` turns a module into machine code once; nothing is written to disk. `run` works off the chunks of a kernel: the
calling thread begins at once, and the helpers of a pool take chunks from the same counter as they wake up. The caller waits for
those that have begun and for nobody else, so that a helper that is late, or that a fork left behind, delays nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import queue
import sys
import threading
from typing import Any

import llvmlite.binding as llvm

from ... import threads

_compiling = threading.RLock()  # LLVM's engine is not to be entered twice
MATH = ("exp", "expf", "log", "logf")  # what compiled code calls of the C library


# ---- compiling ------------------------------------------------------------------------------------------------------------
class Compiler:
    """LLVM's engine of this process, which owns all compiled code."""

    def __init__(self) -> None:
        with contextlib.suppress(RuntimeError):  # newer ones do it by themselves, and refuse to be told
            llvm.initialize()
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self.triple = llvm.get_process_triple()
        features = llvm.get_host_cpu_features().flatten()
        reloc = "static" if self.triple.startswith(("x86_64", "i386", "i686")) else "default"
        self.machine = llvm.Target.from_triple(self.triple).create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=features, opt=3, reloc=reloc, codemodel="jitdefault", jit=True
        )
        _find_math()
        module = llvm.parse_assembly("")
        module.triple = self.triple
        self.engine = llvm.create_mcjit_compiler(module, self.machine)

    def optimise(self, module: Any) -> None:
        """All of -O3, loops and straight lines vectorised."""
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        options.loop_vectorization = options.slp_vectorization = True
        builder = llvm.create_pass_builder(self.machine, options)
        builder.getModulePassManager().run(module, builder)

    def add(self, text: str, name: str) -> int:
        module = llvm.parse_assembly(text)
        module.triple, module.data_layout = self.triple, str(self.machine.target_data)
        module.verify()  # what is wrong is said here, and would end the process there
        self.optimise(module)
        self.engine.add_module(module)
        self.engine.finalize_object()
        return int(self.engine.get_function_address(name))


@functools.cache
def _compiler() -> Compiler:
    return Compiler()


def _find_math() -> None:
    """Make the C library's functions known to LLVM, which looks for them where a program's own symbols are."""
    if all(llvm.address_of_symbol(name) for name in MATH):
        return
    library = ctypes.CDLL({"win32": "ucrtbase", "darwin": "libm.dylib"}.get(sys.platform, "libm.so.6"))
    for name in MATH:
        if (found := getattr(library, name, None)) is not None:
            llvm.add_symbol(name, ctypes.cast(found, ctypes.c_void_p).value)


def compile_module(text: str, name: str) -> int:
    """Return the address of the function `name` of an IR module."""
    with _compiling:
        return _compiler().add(text, name)


BRIEF = 16384  # elements up to which a call keeps the interpreter's lock
#: entries read and written from which a second thread pays: to start one takes as long as to move a third of them, about 10 µs
WORTHWHILE = 1 << 19


# ---- running --------------------------------------------------------------------------------------------------------------
class Call:
    """A compiled function that takes an address alone, and the words at that address: those given, and a counter in the last."""

    def __init__(self, function: int, *words: int):
        self.words = (ctypes.c_int64 * (len(words) + 1))(*words)
        self.where, self.last = ctypes.addressof(self.words), len(words)
        self.function = _FREE(function)
        self.brief = _HELD(function)

    def run(self, elements: int, moved: int) -> None:
        """Run it. It keeps the interpreter's lock where there are few elements, which is cheaper; several threads share the work
        by the counter where many entries are moved."""
        self.words[self.last] = 0
        if elements < BRIEF:
            self.brief(self.where)
        elif moved < WORTHWHILE or (count := threads.get_threads()) < 2:
            self.function(self.where)
        else:
            _pool.run(self, count)


_FREE, _HELD = ctypes.CFUNCTYPE(None, ctypes.c_int64), ctypes.PYFUNCTYPE(None, ctypes.c_int64)


class Task:
    """A call that helpers may join until it is closed."""

    __slots__ = ("call", "closed", "done", "inside")

    def __init__(self, call: Call):
        self.call, self.inside, self.closed, self.done = call, 0, False, threading.Lock()
        self.done.acquire()


class Pool:
    """Helping threads. They are daemons: an interpreter that ends does not wait for them."""

    def __init__(self) -> None:
        self.lock, self.tasks, self.helpers = threading.Lock(), queue.SimpleQueue[Task](), 0

    def run(self, call: Call, threads: int) -> None:
        task, interrupt = Task(call), None
        if self.helpers < threads - 1:
            self.start_helpers(threads - 1)
        for _ in range(threads - 1):
            self.tasks.put(task)
        call.function(call.where)
        while True:  # an interrupt waits until nobody works on the caller's arrays
            try:
                with self.lock:
                    task.closed = True
                if task.inside:
                    task.done.acquire()
                break
            except BaseException as problem:
                interrupt = problem
        if interrupt is not None:
            raise interrupt

    def start_helpers(self, wanted: int) -> None:
        with self.lock:
            while self.helpers < wanted:
                try:
                    threading.Thread(target=self.work, daemon=True, name=f"rlx_optim-{self.helpers}").start()
                except RuntimeError:  # no more threads here, or the interpreter is ending: the caller does the work
                    return
                self.helpers += 1

    def work(self) -> None:
        while True:
            task = self.tasks.get()
            with self.lock:
                if task.closed:
                    continue
                task.inside += 1
            task.call.function(task.call.where)
            with self.lock:
                task.inside -= 1
                last = task.closed and not task.inside
            if last:
                task.done.release()
            del task  # and with it the arrays that it refers to


_pool = Pool()


def _renew_pool() -> None:
    """In a child, which has none of its parent's threads: a pool of its own."""
    global _pool
    _pool = Pool()
    _compiling.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_compiling.acquire, after_in_parent=_compiling.release, after_in_child=_renew_pool)
