"""The table of clients' calls is what a real engine answers today."""

from tests.helpers.client_calls import CALLS, PAGE, ask_all, page


def test_85_of_90_calls_of_clients_pass_and_the_page_names_the_others():
    results = ask_all()
    assert len(CALLS) >= 90 and results.count("") / len(CALLS) >= 85 / 90, [r for r in results if r]
    assert page(results) == PAGE.read_text(encoding="utf-8"), "`python tests/helpers/client_calls.py` writes it"
