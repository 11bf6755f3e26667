"""Capture on a device: tensors are summarised or copied there without waiting for it.

Kernels summarise a tensor in the program's own stream, or copy it there and send the copy from
another stream. Tensors like the last one of their place are launched by a C library and listed in
groups (`runs.sinks.Group`), whose lines are made when they are written. Records wait in a queue
until their figures or bytes have come, and everything taken after them waits behind, because a sink
numbers what it gets.
"""
