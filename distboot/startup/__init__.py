"""The parts of `init`: which processes it refuses, how the ranks meet, what the platform reads.

`initialize` puts them together. They may use everything below them, the frameworks included.
"""
