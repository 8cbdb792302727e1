package backend

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/penstock/penstock/internal/duration"
	"github.com/penstock/penstock/pkg/scale"
)

// Webhook tells another system by HTTP how many instances a deployment is to have. That system starts them, and
// they register themselves. The target of a deployment is {"url": "https://..."}.
type Webhook struct{ cfg WebhookConfig }

// WebhookConfig has the functions that the program supplies. Sign and Check are required.
type WebhookConfig struct {
	// Client makes the requests; it follows no redirect. http.DefaultTransport with a limit of 10 s if nil.
	Client *http.Client
	// Sign returns the headers that prove the origin of a body.
	Sign func(id string, at time.Time, body []byte) (http.Header, error)
	// Check returns an error for an address that must not be called.
	Check func(url string) error
}

// NewWebhook returns the backend.
func NewWebhook(cfg WebhookConfig) *Webhook {
	client := *cmp.Or(cfg.Client, &http.Client{Timeout: 10 * time.Second})
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	cfg.Client = &client
	return &Webhook{cfg}
}

// WebhookOrder is the body of a request. The receiver is to have as many instances as Desired, and stops only
// those of Remove: no request runs there, and none will. An order with a smaller DecisionID is out of date.
type WebhookOrder struct {
	Deployment string          `json:"deployment"`
	Model      string          `json:"model"`
	Desired    int             `json:"desired"` // instances that are to exist, those that drain included
	Current    int             `json:"current"` // that are registered
	Remove     []string        `json:"remove"`
	Reason     string          `json:"reason"`
	DecisionID int64           `json:"decision_id"`
	Template   json.RawMessage `json:"template,omitempty"`
}

// List implements scale.Backend: instances register themselves.
func (w *Webhook) List(context.Context, scale.BackendTarget) ([]scale.BackendInstance, error) {
	return nil, scale.ErrUnlisted
}

// Apply implements scale.Backend: PUT to the address of the deployment, which answers 2xx. After another answer it is
// tried again no sooner than its Retry-After says.
func (w *Webhook) Apply(ctx context.Context, o scale.Order) error {
	var target struct {
		URL string `json:"url"`
	}
	if err := json.Unmarshal(o.Target, &target); err != nil || target.URL == "" {
		return fmt.Errorf("target of deployment %q: want {\"url\": \"https://...\"}", o.Name)
	}
	if err := w.cfg.Check(target.URL); err != nil {
		return fmt.Errorf("target of deployment %q: %w", o.Name, err)
	}
	order := WebhookOrder{
		Deployment: o.Name, Model: o.Model, Desired: o.Count, Current: o.Current, Remove: o.Remove, Reason: o.Reason,
		DecisionID: o.ID, Template: o.Template,
	}
	if order.Remove == nil {
		order.Remove = []string{}
	}
	body, err := json.Marshal(order)
	if err != nil {
		return fmt.Errorf("write order: %w", err)
	}
	header, err := w.cfg.Sign(o.Name+"-"+strconv.FormatInt(o.ID, 10), time.Now(), body)
	if err != nil {
		return fmt.Errorf("sign order: %w", err)
	}
	return w.put(ctx, target.URL, header, body)
}

// webhookRetryMax bounds how long a receiver may ask to wait.
const webhookRetryMax = 5 * time.Minute

func (w *Webhook) put(ctx context.Context, url string, header http.Header, body []byte) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodPut, url, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("address of the target: %w", err)
	}
	request.Header = header
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Idempotency-Key", header.Get("Webhook-Id"))
	reply, err := w.cfg.Client.Do(request)
	if err != nil {
		return fmt.Errorf("send order: %w", err)
	}
	defer reply.Body.Close()
	said, _ := io.ReadAll(io.LimitReader(reply.Body, 300))
	if reply.StatusCode/100 != 2 {
		return &statusError{
			code: reply.StatusCode, doing: "send order", reason: strings.ToValidUTF8(string(said), ""),
			after: duration.RetryAfter(reply.Header, time.Now(), webhookRetryMax),
		}
	}
	return nil
}
