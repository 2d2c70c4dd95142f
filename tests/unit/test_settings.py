"""One table has every setting: variable, option and argument have one word, and `init` and `run` know them."""

import inspect
import re
import sys

import pytest
from conftest import Run

import distboot
from distboot.base.settings import KNOWN, SETTINGS, Setting, supervision_settings, value_of

WITH_OPTION = [setting for setting in SETTINGS if setting.option]
WITH_ARGUMENT = [setting for setting in SETTINGS if setting.argument]


def _word(setting: Setting) -> str:
    return setting.variable.removeprefix("DISTBOOT_").lower()


@pytest.mark.parametrize("setting", SETTINGS, ids=_word)
def test_one_word_for_variable_option_and_argument(setting: Setting) -> None:
    assert setting.option in ("", f"--{_word(setting).replace('_', '-')}")
    assert setting.argument in ("", _word(setting))


@pytest.mark.parametrize("setting", SETTINGS, ids=_word)
def test_default_is_a_valid_value(setting: Setting) -> None:
    found = value_of(setting.variable, {})
    assert (found == setting.unset) == (setting.default == "")


def test_names_are_unique() -> None:
    assert len(set(KNOWN)) == len(KNOWN)


def test_help_of_run_has_every_option(distboot: Run) -> None:
    shown = " ".join(distboot("run", "--help", env={"COLUMNS": "2000"}).stdout.split())
    for setting in WITH_OPTION:
        text = setting.help.replace("`", "")
        default = f"(default: {setting.variable}, or {setting.default or setting.without})"
        assert f" {setting.option} {setting.metavar} {text} {default}" in shown


def test_init_documents_every_argument() -> None:
    assert distboot.init.__doc__ is not None
    for setting in WITH_ARGUMENT:
        assert setting.argument in inspect.signature(distboot.init).parameters
        text = re.search(
            rf"^ +{setting.argument}: .*(?:\n {{12,}}.*)*", distboot.init.__doc__, re.MULTILINE
        )
        assert text is not None
        assert setting.variable in text[0]


WITHOUT_EFFECT = [
    (
        {"DISTBOOT_HANG_AFTER": "300"},
        [],
        "DISTBOOT_HANG_AFTER has no effect without DISTBOOT_HANG=stop",
    ),
    ({"DISTBOOT_HANG_AFTER": "300", "DISTBOOT_HANG": "stop"}, [], ""),
    (
        {"DISTBOOT_RESTART_DELAY": "5", "DISTBOOT_MAX_RESTARTS": "0"},
        [],
        "DISTBOOT_RESTART_DELAY has no effect without DISTBOOT_MAX_RESTARTS",
    ),
    ({"DISTBOOT_RESTART_DELAY": "5"}, ["--max-restarts=1"], ""),
    (
        {"DISTBOOT_MAX_RESTARTS": "1"},
        ["--restart-window=5", "--max-restarts=0"],
        "--restart-window has no effect without --max-restarts",
    ),
    ({}, ["--restart-delay=0", "--max-restarts=1"], ""),
    (
        {"DISTBOOT_JOB_END_TIME": "4102444800"},
        [],
        "DISTBOOT_JOB_END_TIME has no effect without DISTBOOT_STOP_BEFORE_END",
    ),
]


@pytest.mark.parametrize(("variables", "options", "warning"), WITHOUT_EFFECT)
def test_setting_without_the_one_it_needs_is_named(
    distboot: Run, variables: dict[str, str], options: list[str], warning: str
) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", **variables}
    result = distboot("run", *options, "--", "true", env=environ)
    said = [line for line in result.stderr.splitlines() if "no effect" in line]
    expected = [f"distboot: warning: {warning}"] if warning else []
    assert (result.returncode, said) == (0, expected)


def test_ineffective_setting_is_named_once_and_by_init(distboot: Run, run: Run) -> None:
    environ = {"DISTBOOT_HANG_AFTER": "300"}
    script = "import distboot; distboot.init(framework='none')"
    alone = run(sys.executable, "-c", script, env=environ)
    wrapped = distboot("run", "--nproc-per-node=2", "--", sys.executable, "-c", script, env=environ)
    for result in (alone, wrapped):
        assert (result.returncode, result.stderr.count("no effect")) == (0, 1)


@pytest.mark.parametrize(
    ("variable", "option"),
    [("DISTBOOT_LOG_FORMAT=xml", "--log-format=text"), ("DISTBOOT_GRACE=soon", "--grace=1")],
)
def test_option_has_precedence(distboot: Run, variable: str, option: str) -> None:
    name, _, text = variable.partition("=")
    assert distboot("run", "--", "true", env={name: text}).returncode == 78
    assert distboot("run", option, "--", "true", env={name: text}).returncode == 0


@pytest.mark.parametrize("words", [["--log-format", "json"], ["--log-format=json"]])
def test_log_format_applies_to_errors_of_other_options(distboot: Run, words: list[str]) -> None:
    result = distboot("run", *words, "--grac", "1", "--", "true")
    assert (result.returncode, result.stderr[0]) == (2, "{")


def test_invalid_log_format_is_refused(distboot: Run) -> None:
    result = distboot("run", "--log-format", "xml", "--", "true")
    assert result.returncode == 2
    assert "error[usage]: --log-format='xml' is neither text nor json\n" in result.stderr
    assert result.stderr.endswith("hint: use text or json\n")


@pytest.mark.parametrize(
    ("env", "what", "hint"),
    [
        (
            {"DISTBOOT_STOP_SIGNALS": "USR1,KILL"},
            "DISTBOOT_STOP_SIGNALS: 'KILL' is not a signal that can ask a script to stop",
            "use some of USR1, USR2, INT, HUP, XCPU, with commas; SIGTERM always asks",
        ),
        (
            {"DISTBOOT_STOP_BEFORE_END": "60"},
            (
                "DISTBOOT_STOP_BEFORE_END is set, but the end of the job is unknown: "
                "DISTBOOT_JOB_END_TIME and SLURM_JOB_END_TIME are missing"
            ),
            "DISTBOOT_JOB_END_TIME=$(( $(date +%s) + 86400 )) for a day from now, or unset it",
        ),
        (
            {"DISTBOOT_STOP_BEFORE_END": "60", "SLURM_JOB_END_TIME": "tomorrow"},
            ("SLURM_JOB_END_TIME='tomorrow' is not a time in seconds since 1970"),
            "date +%s prints the time now",
        ),
        (
            {"DISTBOOT_STOP_BEFORE_END": "-1"},
            ("DISTBOOT_STOP_BEFORE_END='-1' is not a valid number of seconds"),
            "use a number of seconds above 0, at most 86400",
        ),
        (
            {"DISTBOOT_STOP_NOTICE": "gcp"},
            ("DISTBOOT_STOP_NOTICE='gcp' is not a provider of stop notices"),
            "use azure or aws, or unset it",
        ),
        (
            {"DISTBOOT_NOTICE_ADDRESS": "nowhere"},
            ("DISTBOOT_NOTICE_ADDRESS='nowhere' is not a host with a port"),
            "unset it, or use HOST:PORT",
        ),
        (
            {"DISTBOOT_NOTICE_ADDRESS": "a\nb:80"},
            ("DISTBOOT_NOTICE_ADDRESS='a\\nb:80' is not a host with a port"),
            "unset it, or use HOST:PORT",
        ),
        (
            {"DISTBOOT_NOTICE_ADDRESS": "a:70000"},
            ("DISTBOOT_NOTICE_ADDRESS='a:70000' is not a host with a port"),
            "unset it, or use HOST:PORT",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(env: dict[str, str], what: str, hint: str) -> None:
    with pytest.raises(distboot.DistbootError) as caught:
        supervision_settings(env)
    assert (caught.value.code, caught.value.message, caught.value.hint) == (
        "broken-environment",
        what,
        hint,
    )
