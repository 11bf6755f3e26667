"""The local viewer: a server on the loopback interface that opens tensors on demand."""
