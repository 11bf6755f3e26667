"""Stores: runs at URLs, read by blocks and uploaded while they are written."""
