package main

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
)

// A gateway reports with its heartbeats which instances have calls of it, as the autoscaler reads it.
func TestHeartbeatsTellWhichInstancesAreInUse(t *testing.T) {
	t.Parallel()
	end := make(chan struct{})
	goOn := sync.OnceFunc(func() { close(end) })
	f := startStaticFront(t, 2, func(w http.ResponseWriter, r *http.Request) {
		if body, _ := io.ReadAll(r.Body); strings.Contains(string(body), "long") {
			<-end
		}
		_, _ = io.WriteString(w, "{}")
	})
	t.Cleanup(goOn)
	type report struct {
		ID          int32 `json:"id"`
		InFlight    int   `json:"in_flight"`
		RemainingMS *int  `json:"remaining_ms"`
	}
	reported := func() []report {
		text, err := json.Marshal(f.status())
		if err != nil {
			t.Fatal(err)
		}
		var load struct {
			Pools map[string]struct {
				Instances []report `json:"instances"`
			} `json:"pools"`
		}
		if err := json.Unmarshal(text, &load); err != nil {
			t.Fatal(err)
		}
		return load.Pools["m"].Instances
	}
	if got := reported(); len(got) != 0 {
		t.Errorf("without a call it reports %+v", got)
	}
	if _, err := io.WriteString(f.dial(), callHead+"Content-Length: 27\r\n\r\n"+`{"model":"m","user":"long"}`); err != nil {
		t.Fatal(err)
	}
	f.until("the call runs", func() bool { return f.running.Load() == 1 })
	if got := reported(); len(got) != 1 || got[0].ID != 1 || got[0].InFlight != 1 || got[0].RemainingMS == nil {
		t.Errorf("with a call it reports %+v", got)
	}
	goOn()
	f.until("the call has ended", func() bool { return f.gateway.States()[0].InFlight == 0 })
}
