package api

import (
	"context"
	"encoding/json"
	"net/http"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// receivers stands for a keeper of receivers; cmd/leader tests the real one.
type receivers struct{}

func (receivers) Register(context.Context, string, invalidation.By) (string, error) {
	return "whsec_", nil
}

func (receivers) Rotate(context.Context, string, time.Duration, invalidation.By) (string, error) {
	return "whsec_", nil
}

func (receivers) Disable(context.Context, string, invalidation.By) error { return nil }

func (receivers) Secrets(context.Context, string) ([]string, error) { return []string{"whsec_"}, nil }

func (receivers) Keys(context.Context) ([]string, error) { return []string{"whpk_"}, nil }

func TestAServerWithoutReceiversSaysSo(t *testing.T) {
	w := newWorld(t)
	w.api = New(w.pool, Config{Open: true})
	if status, answer := w.send("GET", "/v1/webhooks/keys", ""); status != http.StatusConflict {
		t.Errorf("%d %v, want 409", status, answer)
	}
}

// TestReadinessCountsWhatIsDegradedAndStaysReady makes a node that died with slots of a model.
func TestReadinessCountsWhatIsDegradedAndStaysReady(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.register_model('flux', '{"protocol": "cog"}'), penstock.register_instance('flux', 'a', 'http://127.0.0.1:9/', 2)`)
	w.leaveSlots()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		answered := w.ask("", "GET", "/readyz", "")
		var said struct {
			Status   string
			Degraded map[string]int
		}
		if err := json.Unmarshal(answered.Body.Bytes(),
			&said); err != nil || answered.Code != http.StatusOK || said.Status != "ready" {
			t.Fatalf("%d %s (%v)", answered.Code, answered.Body, err)
		}
		if said.Degraded["dead_slots"] == 1 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the probe says %s, want one model with slots of dead nodes", answered.Body)
		}
	}
}

// A variable that is empty must not renew the secret of all receivers.
func TestAnEmptyAddressRenewsNoSecret(t *testing.T) {
	w := newWorld(t)
	w.api = New(w.pool, Config{Open: true, Webhooks: receivers{}})
	status, answer := w.send("POST", "/v1/webhooks/rotate", `{"url": "", `+reason+`}`)
	if status != http.StatusUnprocessableEntity {
		t.Errorf("%d %v, want 422", status, answer)
	}
}
