"""Capture of single torch operators through the dispatcher.

A dispatch mode sees every aten call, inside and outside modules: a functional loss, sampling, an
optimizer's arithmetic, a program without any module. It is below all modes of the program, because
a program pops the topmost mode, whichever it is. Modes belong to threads: ours is on in the thread
that began the capture, and in every other thread from its first module call on.

Outside modules an operator belongs to the current step: that of the model called last, or the step
that the optimizer or `driftline.step()` has counted. Operators that a launched program runs outside
modules before its first call of a model are left out. They initialise, cast and load weights; in
another number format random weights differ without a fault. If a program never calls a model, all
its operators are captured. Until that is known, tensors are kept in memory, at most 64 MB.

Not captured are the inside of compiled regions, what a collective receives (it returns before it is
done), data workers, TorchScript while it is traced, and threads that never call a module. The
results of a few functions change in their last bits if any mode is on: the backward of `prod`,
`cumprod` and `det`, singular values and eigenvalues, tangents of norms and of `prod`. They run
without our mode, and an event reports it. For tangents this holds for a whole level of forward-mode
differentiation. One case cannot be handled from Python: a thread that is already watched and gets
dual tensors from another thread, until its next call of a model.
"""
