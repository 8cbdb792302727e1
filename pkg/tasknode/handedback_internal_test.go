package tasknode

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

func endings(answers ...error) []invalidation.Ending {
	var endings []invalidation.Ending
	for i, err := range answers {
		lock := &invalidation.Lock{Entries: []invalidation.Entry{{ID: invalidation.EntryID(i + 1)}}}
		r := &invalidation.Run{Queue: &invalidation.Queue{}, Lock: lock, Entry: lock.Entries[0]}
		endings = append(endings, invalidation.Judge(r, nil, err, time.Second, 0.5))
	}
	return endings
}

// The queue's worker takes calls again: what it answered before keeps no entry.
func TestAReasonOfAHandBackGoesOnceAHandlerEndsAnEntry(t *testing.T) {
	busy := invalidation.NoCapacity(10*time.Minute, errors.New("worker answered 503"))
	for name, c := range map[string]struct {
		answer error
		stays  bool
	}{
		"done":    {nil, false},
		"retry":   {invalidation.RetryIn(time.Second, errors.New("no")), false},
		"failure": {invalidation.Permanent(errors.New("no")), false},
		"snooze":  {invalidation.Snooze(time.Second), true},
	} {
		t.Run(name, func(t *testing.T) {
			var h handedBack
			now := time.Now()
			e := endings(busy, c.answer)
			h.add("work", &e[0], now)
			h.add("other", &e[0], now)
			h.add("work", &e[1], now.Add(time.Second))
			if _, reported := h.report(now.Add(2 * time.Second))["work"]; reported != c.stays {
				t.Errorf("the reason is reported: %t, want %t", reported, c.stays)
			}
			if _, reported := h.report(now.Add(2 * time.Second))["other"]; !reported {
				t.Error("the reason of another queue is gone")
			}
		})
	}
}

// A heartbeat writes the reasons anew every time, so that they are bounded together, and those of a moment ago come first.
func TestReasonsOfHandBacksAreBoundedTogetherAndTheNewestStay(t *testing.T) {
	for name, text := range map[string]string{"plain": "x", "escaped in JSON": "<", "of several bytes": "\u00fc"} {
		t.Run(name, func(t *testing.T) {
			var h handedBack
			now := time.Now()
			const queues = 3 * handBackQueues
			for i := range queues {
				e := endings(invalidation.NoCapacity(time.Second, errors.New(strings.Repeat(text, 400))))
				h.add(fmt.Sprintf("queue-%03d", i), &e[0], now.Add(time.Duration(i)*time.Millisecond))
			}
			report := h.report(now.Add(time.Second))
			load, err := json.Marshal(report)
			if err != nil {
				t.Fatal(err)
			}
			if len(load) > 4096 {
				t.Errorf("the reasons take %d bytes of a heartbeat, want 4096 at most", len(load))
			}
			if len(report) == 0 {
				t.Fatal("no reason is reported")
			}
			for i := range len(report) {
				if queue := fmt.Sprintf("queue-%03d", queues-1-i); report[queue] == nil {
					t.Errorf("of %d reasons that of %s is missing", len(report), queue)
				}
			}
		})
	}
}
