"""Real bugs of public projects as small programs, and what each way of judging says of them."""
