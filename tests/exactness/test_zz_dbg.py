import tests.exactness.test_state_machine as t
from hypothesis import Phase, settings
import pytest
@pytest.mark.timeout(250)
def test_count(engine):
    t.settings=lambda **k: settings(**{**k,"max_examples":500, "phases":[Phase.generate], "report_multiple_bugs":False})
    t.test_whatever_happens_in_whatever_order_the_outbox_does_what_the_model_does(engine, False)
