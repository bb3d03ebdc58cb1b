"""docs/settings.md is what the classes say."""

from __future__ import annotations

from pathlib import Path

import pytest

from skerry import settings_page


def test_the_page_is_up_to_date():
    assert settings_page.PAGE.read_text(encoding="utf-8") == settings_page.page()


def test_it_names_keys_variables_and_defaults_but_not_this_machine():
    text = settings_page.page()
    assert "`SKERRY_TASKS__NAME__REFERENCE`" in text
    assert '`"127.0.0.1:8470"`' in text
    assert "/bin/python" not in text


def test_check_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(settings_page, "PAGE", tmp_path / "settings.md")
    assert settings_page.main(["--check"]) == 1
    assert settings_page.main([]) == 0
    assert settings_page.main(["--check"]) == 0
    assert settings_page.main(["--nonsense"]) == 2
