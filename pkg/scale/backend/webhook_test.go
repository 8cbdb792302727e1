package backend

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/scale"
)

func newHook(t *testing.T, answer http.HandlerFunc) (*Webhook, scale.Order) {
	t.Helper()
	receiver := httptest.NewServer(answer)
	t.Cleanup(receiver.Close)
	hook := NewWebhook(WebhookConfig{
		Sign: func(id string, _ time.Time, body []byte) (http.Header, error) {
			return http.Header{"Webhook-Id": {id}, "Webhook-Signature": {"v1," + string(body[:1])}}, nil
		},
		Check: func(url string) error {
			if strings.Contains(url, "metadata") {
				return errors.New("a private address")
			}
			return nil
		},
	})
	target, err := json.Marshal(map[string]string{"url": receiver.URL + "/scale"})
	if err != nil {
		t.Fatal(err)
	}
	return hook, scale.Order{
		BackendTarget: scale.BackendTarget{Name: "spot", Model: "llama", Target: target},
		ID:            41, Count: 3, Current: 2, Remove: []string{"gpu-2"}, Reason: "3 desired",
	}
}

func TestAnOrderIsPutAndSigned(t *testing.T) {
	var got WebhookOrder
	hook, order := newHook(t, func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil || json.Unmarshal(body, &got) != nil {
			t.Errorf("body: %v %s", err, body)
		}
		if r.Method != http.MethodPut || r.Header.Get("Webhook-Id") != "spot-41" || r.Header.Get("Webhook-Signature") != "v1,{" ||
			r.Header.Get("Idempotency-Key") != "spot-41" {
			t.Errorf("%s %v", r.Method, r.Header)
		}
		w.WriteHeader(http.StatusAccepted)
	})
	if err := hook.Apply(t.Context(), order); err != nil {
		t.Fatal(err)
	}
	if got.Desired != 3 || got.Current != 2 || got.DecisionID != 41 || got.Reason != "3 desired" || got.Remove[0] != "gpu-2" {
		t.Errorf("%+v", got)
	}
	if _, err := hook.List(t.Context(), order.BackendTarget); !errors.Is(err, scale.ErrUnlisted) {
		t.Errorf("list: %v", err)
	}
}

func TestAReceiverThatAsksToWaitIsTriedNoSooner(t *testing.T) {
	hook, order := newHook(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Retry-After", "120")
		w.WriteHeader(http.StatusTooManyRequests)
	})
	var told interface{ RetryAfter() time.Duration }
	if err := hook.Apply(t.Context(), order); !errors.As(err, &told) || told.RetryAfter() != 2*time.Minute {
		t.Errorf("%v", err)
	}
}

func TestAnOrderThatIsNotAcceptedIsAnError(t *testing.T) {
	for _, answer := range []http.HandlerFunc{
		func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusConflict) },
		func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) },
		func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", "http://169.254.169.254/")
			w.WriteHeader(http.StatusTemporaryRedirect)
		},
		func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
	} {
		hook, order := newHook(t, answer)
		if err := hook.Apply(t.Context(), order); err == nil {
			t.Error("no error")
		}
	}
	hook, order := newHook(t, func(http.ResponseWriter, *http.Request) { t.Error("called") })
	for _, target := range []string{`{}`, `[]`, `{"url": "http://metadata/"}`} {
		order.Target = []byte(target)
		if err := hook.Apply(t.Context(), order); err == nil {
			t.Errorf("target %s: no error", target)
		}
	}
}
