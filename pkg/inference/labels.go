package inference

import (
	"encoding/json"
	"fmt"
	"slices"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// labels are those that the entry asks its instance to have, as its payload has them; empty for none.
func (a *dispatch) labels() string {
	if a.model.LabelsField == "" {
		return ""
	}
	return worker.TextField(a.call.Payload, a.model.LabelsField)
}

// unfit returns the instances that lack a label which the entry asks for, and whether any has them all.
func (a *dispatch) unfit() (unfit map[int32]bool, fits bool) {
	text := a.labels()
	if text == "" {
		return nil, true
	}
	var wanted map[string]string
	if json.Unmarshal([]byte(text), &wanted) != nil {
		return nil, true // the field is something else
	}
	unfit = map[int32]bool{}
	for _, e := range a.registry.Endpoints(a.model.Name) {
		for name, value := range wanted {
			if e.Labels[name] != value {
				unfit[e.ID] = true
			}
		}
		fits = fits || !unfit[e.ID]
	}
	return unfit, fits
}

// anyUsable says whether calls may be sent to an instance that is not unfit.
func (a *dispatch) anyUsable(unfit map[int32]bool) bool {
	return slices.ContainsFunc(a.usableInstances(), func(id int32) bool { return !unfit[id] })
}

// fitsNowhere hands back an entry that no instance takes, as it asks for labels, or as they are.
func (a *dispatch) fitsNowhere() error {
	reason := fmt.Errorf("no instance of model %q takes calls", a.model.Name)
	if labels := a.labels(); labels != "" {
		reason = fmt.Errorf("%w and has the labels %s", reason, labels)
	}
	return invalidation.NoCapacity(a.config.ReadyWait, reason)
}
