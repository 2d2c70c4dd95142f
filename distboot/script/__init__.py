"""What runs in the process of the user's script: hooks, `ctx.preempted`, the shield of workers.

That Python may have another distboot, or none. So each module imports only the standard library,
its siblings and `base/`, and little of it before it is needed. `patch_table` is the table of all that
these modules change there. `injected/` goes on PYTHONPATH below the wrapper.
"""
