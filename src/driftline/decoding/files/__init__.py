"""Files that the decoder commands write and read: names, formats, and work that is not finished.

Knows nothing about how models compute what is in them.
"""
