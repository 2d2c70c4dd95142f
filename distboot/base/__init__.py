"""What every folder uses: text for people, errors, settings, commands, threads, processes.

It imports no other folder.
"""
