"""The yardstick: planted faults and fault-free pairs, and what each way of judging says of them."""
