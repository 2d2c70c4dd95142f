"""What every folder uses: text for people, errors, settings, commands, threads, /proc. Imports no other."""
