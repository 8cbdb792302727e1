package main

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/penstock/penstock/chaos/judge"
)

// Entries under a rate are pushed in one request, and each of its operations is recorded with what the client was told.
func TestEntriesUnderARateArePushedTogether(t *testing.T) {
	for status, told := range map[int]int{http.StatusCreated: ratedPush, http.StatusBadRequest: 0} {
		var bodies [][]struct{ Payload payload }
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			var list []struct{ Payload payload }
			if text, err := io.ReadAll(r.Body); err != nil || json.Unmarshal(text, &list) != nil {
				t.Errorf("%s: not a list", text)
			}
			bodies = append(bodies, list)
			w.WriteHeader(status)
			var answer struct {
				Entries []map[string]int64 `json:"entries"`
			}
			for _, one := range list {
				answer.Entries = append(answer.Entries, map[string]int64{"id": 100 + one.Payload.Op})
			}
			_ = json.NewEncoder(w).Encode(answer)
		}))
		l := &load{leaders: []string{server.URL}, http: server.Client(), patient: t.Context()}
		l.rated(&judge.Push{Op: l.ops.Add(1)}, payload{MS: 5})()
		server.Close()
		if len(bodies) != 1 || len(bodies[0]) != ratedPush || len(l.pushes) != ratedPush {
			t.Fatalf("%d requests, %d operations; want one of %d", len(bodies), len(l.pushes), ratedPush)
		}
		n := 0
		for i, p := range l.pushes {
			if p.Op != int64(i+1) || p.Queue != ratedQueue || p.Told && p.Entry != 100+p.Op || p.Refused == p.Told {
				t.Errorf("operation %d was recorded as %+v", i+1, *p)
			}
			if p.Told {
				n++
			}
		}
		if n != told {
			t.Errorf("status %d: %d operations were told, want %d", status, n, told)
		}
	}
}
