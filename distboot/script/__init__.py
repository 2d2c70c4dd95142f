"""What runs in the process of the user's script, which may be a Python with another distboot, or none.

Each module imports the standard library, its siblings and `base/text`, and little of it before it is
needed. `injected/` goes on PYTHONPATH below the wrapper.
"""
