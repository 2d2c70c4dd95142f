"""What every other folder may use: text for people, errors, settings, and this process. Imports nothing of ours."""
