"""What a person runs beside a job: `show`, `env`, `doctor`, `launchers`, `stacks`, `try`, and the plugin for pytest.

The command line imports each by name when it is asked for; nothing else imports from here.
"""
