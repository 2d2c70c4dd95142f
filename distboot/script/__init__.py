"""What runs in the process of the user's script, which may be a Python with another distboot, or none.

Each module here imports nothing but the standard library and its siblings, and little of it before it is needed.
"""
