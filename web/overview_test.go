package web

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/operator"
)

// The counts of a queue that was not measured yet are not known: they are no zeros.
func TestTheOverviewNamesQueuesThatAreNotMeasuredYet(t *testing.T) {
	age := 3.0
	measured, fresh := operator.Queue{Name: "mails", Pending: 7, AwaitingCompute: 7, HeadAgeSeconds: &age}, operator.Queue{Name: "new", Unmeasured: true}
	const note, none = "without 1 queue not measured yet", `<p class="note">not measured yet</p>`
	for name, c := range map[string]struct {
		queues []operator.Queue
		has    []string
		hasNot []string
	}{
		"measured": {[]operator.Queue{measured}, []string{"7 waiting"}, []string{"not measured yet", none}},
		"mixed":    {[]operator.Queue{measured, fresh}, []string{"7 waiting", note}, []string{none}},
		"none":     {[]operator.Queue{fresh}, []string{none, note}, []string{"nothing waits"}},
	} {
		readings := fleetReadings("acme")
		readings["queues"], readings["failed"], readings["gpu"] = c.queues, int64(0), operator.GPUUse{}
		readings["trends"] = gather(nil, time.Now().Add(-trendOver))
		status, text := draw(t, inMemory(t, readings), "")
		if status != http.StatusOK {
			t.Fatalf("%s: %d: %s", name, status, text)
		}
		for _, want := range c.has {
			if !strings.Contains(text, want) {
				t.Errorf("%s: the page has no %q", name, want)
			}
		}
		for _, bad := range c.hasNot {
			if strings.Contains(text, bad) {
				t.Errorf("%s: the page has %q", name, bad)
			}
		}
	}
}
