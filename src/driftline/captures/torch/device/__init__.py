"""Capture on a device: tensors are summarised or copied on the device, without waiting for it.

A tensor is summarised by kernels in the program's own stream, or copied in that stream into a
staging buffer, which is sent to the host in another stream. If a tensor is of the same kind as the
previous one of its place, a C library launches its kernel, and it is listed in a group
(`runs.sinks.Group`), whose index lines are made when they are written. Records wait in a queue
until their summaries or bytes have arrived. Everything taken after them waits too, because a sink
numbers records in the order in which it gets them.
"""
