"""Capture of single torch operators through the dispatcher.

A dispatch mode sees every aten call, in modules and outside of them: a functional loss, sampling,
an optimizer's arithmetic, a program without any module. It is below all modes of the program,
because modes are taken off from the top without asking whose they are. Modes belong to threads: it
is on in the thread that began the capture, and in others from their first module call on.

Outside modules an operator belongs to the current step: that of the model called last, or what the
optimizer or `driftline.step()` has counted. What a launched program runs outside modules before its
first call of a model is left out: weights are drawn, cast and loaded there, and drawn in another
number format they differ without a fault. A program that never calls a model gets all its operators
instead; until that is known they are held in memory, at most 64 MB.

Not seen: the inside of compiled regions, what a collective receives (it returns before it is done),
data workers, TorchScript while it is traced, threads that never call a module. A few functions
change their last bits as soon as any mode is on (the backward of `prod`, `cumprod` and `det`,
singular values and eigenvalues, tangents of norms and of `prod`): they run without ours, and an
event says so. For tangents that is a whole level of forward-mode differentiation. One case is left
that cannot be closed from Python: a thread that is watched already and receives dual tensors from
another one, until its next call of a model.
"""
