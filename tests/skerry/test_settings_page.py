"""docs/settings.md is what the classes say."""

from __future__ import annotations

from skerry import settings_page


def test_it_names_keys_variables_and_defaults_but_not_this_machine():
    text = settings_page.page()
    assert "`SKERRY_TASKS__NAME__REFERENCE`" in text
    assert '`"127.0.0.1:8470"`' in text
    assert "/bin/python" not in text
