package web

import "testing"

// The two lines of the rates differ by more than their colours, as those of the small pictures do.
func TestTheLinesOfTheRatesAreToldApartWithoutColour(t *testing.T) {
	lines := trend{}.chart().Series
	if len(lines) != 2 || lines[0].Dashed == lines[1].Dashed {
		t.Errorf("the lines are %+v", lines)
	}
}
