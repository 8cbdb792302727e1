package inference

import (
	"encoding/json"
	"fmt"
	"slices"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// labels are those that the entry asks its instance to have, as its payload has them; empty for none.
func (d *dispatch) labels() string {
	if d.model.LabelsField == "" {
		return ""
	}
	return worker.TextField(d.call.Payload, d.model.LabelsField)
}

// unfit returns the instances that lack a label which the entry asks for, and whether any has them all.
func (d *dispatch) unfit() (unfit map[int32]bool, fits bool) {
	text := d.labels()
	if text == "" {
		return nil, true
	}
	var wanted map[string]string
	if json.Unmarshal([]byte(text), &wanted) != nil {
		return nil, true // the field is something else
	}
	unfit = map[int32]bool{}
	for _, e := range d.registry.Endpoints(d.model.Name) {
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
func (d *dispatch) anyUsable(unfit map[int32]bool) bool {
	return slices.ContainsFunc(d.usableInstances(), func(id int32) bool { return !unfit[id] })
}

// fitsNowhere hands back an entry that no instance takes, as it asks for labels, or as they are.
func (d *dispatch) fitsNowhere() error {
	reason := fmt.Errorf("no instance of model %q takes calls", d.model.Name)
	if labels := d.labels(); labels != "" {
		reason = fmt.Errorf("%w and has the labels %s", reason, labels)
	}
	return invalidation.NoCapacity(d.tuning.readyWait, reason)
}
