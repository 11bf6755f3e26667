"""The interface of Paddle's training hooks and of their checker."""
