package api

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// jobRoutes are the addresses of a dispatcher that sends inference requests to GPU servers, in its
// words: a job is an entry of an inference queue, its dead letters are failures. Clients and scripts written
// for one find here what they know. These changes come without a reason; the audit says by which address they
// came.
func (a *API) jobRoutes() {
	const config, dlq = "/admin/model-configs/{model}", "/admin/dlq"
	a.raw(route{
		method: "POST", path: "/queue/submit", id: "submit-job", summary: "Push an entry to the queue of a model",
		scope: push, of: ofNobody, bytesMax: a.cfg.BodyBytesMax,
	}, a.describeSubmission, a.submitJob)
	add(a, route{
		method: "POST", path: "/admin/register", id: "register-server",
		summary: "Register a server of a model; an unknown model is created with the protocol of a dispatcher",
		scope:   admin, of: ofPlatform,
	}, a.registerServer)
	add(a, route{
		method: "GET", path: config, id: "show-model-config",
		summary: "Effective config of a model: registered values, override and defaults",
		scope:   read, of: ofModel,
	}, func(ctx context.Context, in *InModel) (*answer[map[string]any], error) {
		return a.modelConfig(ctx, in.Model)
	})
	add(a, route{
		method: "PUT", path: config, id: "put-model-config",
		summary: "Replace the override of a model's config",
		scope:   admin, of: ofPlatform,
	}, a.putModelConfig)
	add(a, route{
		method: "DELETE", path: config, id: "delete-model-config",
		summary: "Remove the override of a model's config",
		scope:   admin, of: ofPlatform,
	}, func(ctx context.Context, in *InModel) (*answer[map[string]any], error) {
		by := a.actor(ctx, "DELETE /admin/model-configs")
		if err := a.operator.OverrideModel(ctx, in.Model, nil, by); err != nil {
			return nil, err
		}
		return a.modelConfig(ctx, in.Model)
	})
	add(a, route{
		method: "GET", path: dlq, id: "list-dlq", scope: read, of: ofPlatform,
		summary: fmt.Sprintf("Failures of all models together, largest ids first, up to %d", dlqMax),
	}, a.listDLQ)
	add(a, route{
		method: "POST", path: dlq + "/{id}/retry", id: "retry-job",
		summary: "Retry a failed entry: it goes back into its queue",
		scope:   operate, of: ofEntry,
	}, func(ctx context.Context, in *InID) (*answer[Job], error) {
		_, err := a.operator.Do(ctx, operator.RetryFailure, in.ID, a.actor(ctx, "POST /admin/dlq"), time.Time{})
		return &answer[Job]{Job{strconv.FormatInt(in.ID, 10), "queued"}}, err
	})
	add(a, route{
		method: "POST", path: dlq + "/retry-all", id: "retry-all-jobs",
		summary: "Retry the failures of all models: one bulk operation for each that has some and none yet",
		scope:   operate, of: ofPlatform, status: http.StatusAccepted,
	}, a.retryAll)
	add(a, route{
		method: "DELETE", path: dlq + "/{id}", id: "delete-job", summary: "Discard a failure",
		scope: operate, of: ofEntry,
	}, func(ctx context.Context, in *InID) (*answer[Job], error) {
		_, err := a.operator.Do(ctx, operator.DiscardFailure, in.ID, a.actor(ctx, "DELETE /admin/dlq"), time.Time{})
		return &answer[Job]{Job{strconv.FormatInt(in.ID, 10), "deleted"}}, err
	})
}

// actor is the actor of a change for the audit, with the address by which the change came.
func (a *API) actor(ctx context.Context, address string) invalidation.By {
	return invalidation.By{Actor: callerOf(ctx).Name, Reason: address}
}

// Job is an entry, in the words of a dispatcher.
type Job struct {
	ID     string `json:"job_id"`
	Status string `json:"status" doc:"queued, reported, deleted or max_retries_exceeded."`
}

// urgent is the priority of jobs that go before others.
const urgent = int16(9)

type submission struct {
	Model       string          `json:"model" minLength:"1" maxLength:"200"`
	Payload     json.RawMessage `json:"payload" doc:"Any JSON value."`
	CallbackURL string          `json:"callback_url,omitempty" maxLength:"2048" doc:"Where the outcome is sent, signed: job_id, status (completed, failed, expired, cancelled) and result or error."`
	Priority    bool            `json:"priority,omitempty" doc:"Before those without; in order among those with it."`
}

func (s *submission) members() []member {
	return []member{
		{"model", &s.Model},
		{"payload", &s.Payload},
		{"callback_url", &s.CallbackURL},
		{"priority", &s.Priority},
	}
}

func (a *API) describeSubmission(op *huma.Operation) {
	op.RequestBody = a.bodyOf(submission{})
	op.Parameters = append(op.Parameters, keyParameter("A second submission with the same key gets the job of the "+
		"first one."))
	op.Responses["200"] = &huma.Response{Description: "OK", Content: jsonOf(a.schema(Job{}))}
}

func (a *API) submitJob(w http.ResponseWriter, r *http.Request) error {
	var in submission
	give, err := a.readMembers(w, r, in.members())
	defer give()
	if err != nil {
		return err
	}
	if err := cmp.Or(lengthOf("model", in.Model, 1, 200),
		lengthOf("callback_url", in.CallbackURL, 0, 2048)); err != nil {
		return err
	}
	if in.Payload == nil {
		return flaw("payload", errMissing)
	}
	if err := checkNumbers("payload", in.Payload); err != nil {
		return err
	}
	p := invalidation.Push{Payload: in.Payload}
	if p.IdempotencyKey, err = idempotencyKey(r.Header); err != nil {
		return err
	}
	if in.Priority {
		high := urgent
		p.Priority = &high
	}
	if err := callerOf(r.Context()).grants(&p); err != nil {
		return err
	}
	if in.CallbackURL != "" {
		if p.Callback, err = json.Marshal(map[string]string{"url": in.CallbackURL, "format": "job"}); err != nil {
			return err
		}
		if a.cfg.CheckCallback != nil {
			if err := a.cfg.CheckCallback(in.CallbackURL); err != nil {
				return flaw("callback_url", err)
			}
		}
	}
	queue, err := a.queueOfModel(r.Context(), in.Model)
	if err != nil {
		return err
	}
	pushed, err := a.pushWithin(r.Context(), queue, p)
	if err != nil {
		return inUse(err, p)
	}
	writeJSON(w, "application/json", http.StatusOK, Job{strconv.FormatInt(int64(pushed[0].ID), 10), "queued"})
	return nil
}

// queueOfModel finds the queue of a model, if the caller may push to it.
func (a *API) queueOfModel(ctx context.Context, model string) (*invalidation.Queue, error) {
	name, application, err := a.operator.Owner(ctx, ofModel, model)
	switch {
	case errors.Is(err, invalidation.ErrNotFound) && callerOf(ctx).limited():
		return nil, errBeyondLimits
	case errors.Is(err, invalidation.ErrNotFound):
		return nil, flaw("model", fmt.Errorf("model %q is not registered: %w", model, invalidation.ErrNotFound))
	case err != nil:
		return nil, err
	case !callerOf(ctx).allows(name, application):
		return nil, errBeyondLimits
	}
	return a.queues.Get(ctx, name)
}

type serverRegistration struct {
	Body struct {
		Model    string `json:"model" minLength:"1" maxLength:"200"`
		Server   string `json:"server" minLength:"1" maxLength:"200"`
		Endpoint string `json:"endpoint" doc:"An http or https address without user or password."`
		Slots    int32  `json:"slots" minimum:"1"`
	}
}

type serverRegistered struct {
	Model     string   `json:"model"`
	Server    string   `json:"server"`
	Queue     string   `json:"queue"`
	Instances []string `json:"instances" nullable:"false" doc:"A name for each slot."`
}

func (a *API) registerServer(ctx context.Context, in *serverRegistration) (*answer[serverRegistered], error) {
	b, by := in.Body, a.actor(ctx, "POST /admin/register")
	err := cmp.Or(addressable("model", b.Model), addressable("server", b.Server), checkEndpoint(b.Endpoint))
	if err != nil {
		return nil, err
	}
	found, err := a.operator.Model(ctx, b.Model)
	if errors.Is(err, invalidation.ErrNotFound) {
		found.Queue, err = a.operator.RegisterModel(ctx, b.Model, []byte(`{"protocol": "dispatcher"}`), by)
	}
	if err == nil {
		err = a.operator.RegisterInstance(ctx,
			operator.Instance{Model: b.Model, Server: b.Server, Endpoint: b.Endpoint, Slots: b.Slots}, by)
	}
	if err != nil {
		return nil, err
	}
	out := serverRegistered{Model: b.Model, Server: b.Server, Queue: found.Queue, Instances: make([]string, b.Slots)}
	for i := range out.Instances {
		out.Instances[i] = fmt.Sprintf("%s-slot%d", b.Server, i)
	}
	return answered(out, nil)
}

// modelConfig answers with every field that has a value, defaults included.
func (a *API) modelConfig(ctx context.Context, name string) (*answer[map[string]any], error) {
	found, err := a.operator.Model(ctx, name)
	if err != nil {
		return nil, err
	}
	text, err := a.cfg.ReadModel(name, found.Config, found.Override)
	if err != nil {
		return nil, err
	}
	var config map[string]any
	err = json.Unmarshal(text, &config)
	return answered(config, err)
}

type modelConfigPut struct {
	InModel
	Body map[string]any
}

func (a *API) putModelConfig(ctx context.Context, in *modelConfigPut) (*answer[map[string]any], error) {
	found, err := a.operator.Model(ctx, in.Model)
	if err != nil {
		return nil, err
	}
	override, err := json.Marshal(in.Body)
	if err != nil {
		return nil, err
	}
	if err := a.checkModel(in.Model, found.Config, override); err != nil {
		return nil, err
	}
	if err := a.operator.OverrideModel(ctx, in.Model, override, a.actor(ctx, "PUT /admin/model-configs")); err != nil {
		return nil, err
	}
	return a.modelConfig(ctx, in.Model)
}

type deadJob struct {
	Job
	Model    string    `json:"model"`
	Error    string    `json:"error"`
	FailedAt time.Time `json:"failed_at"`
	Attempts int16     `json:"attempts"`
}

type deadJobs struct {
	Jobs      []deadJob `json:"jobs" nullable:"false"`
	Count     int       `json:"count" doc:"Of the jobs in this answer."`
	Truncated bool      `json:"truncated" doc:"There are older ones: /v1/failures lists all of a queue."`
}

// dlqMax bounds the jobs of one answer: there is no paging in it.
const dlqMax = 1000

func (a *API) listDLQ(ctx context.Context, _ *struct{}) (*answer[deadJobs], error) {
	failures, err := a.operator.ModelFailures(ctx, dlqMax+1)
	if err != nil {
		return nil, err
	}
	kept := failures[:min(len(failures), dlqMax)]
	jobs := make([]deadJob, 0, len(kept))
	for _, f := range kept {
		jobs = append(jobs, deadJob{
			Job{strconv.FormatInt(f.ID, 10), "max_retries_exceeded"}, f.Model, f.Error, f.FailedAt, f.Attempt,
		})
	}
	return answered(deadJobs{jobs, len(jobs), len(failures) > len(kept)}, nil)
}

type retriedAll struct {
	Operations []int64      `json:"operation_ids" nullable:"false" doc:"/v1/operations/{id} says how far each is."`
	Running    []int64      `json:"running,omitempty" nullable:"false" doc:"Operations that did so already."`
	Errors     []modelError `json:"errors,omitempty" nullable:"false" doc:"Models of which none was begun, and why."`
}

type modelError struct {
	Model  string `json:"model"`
	Code   string `json:"code" doc:"As of a problem."`
	Detail string `json:"detail"`
}

// retryAll begins an operation for each model that has failures and none yet. What is about one model keeps no other
// one from it; where the database is away the answer says what was begun before.
func (a *API) retryAll(ctx context.Context, _ *struct{}) (*answer[retriedAll], error) {
	models, err := a.operator.FailedModels(ctx)
	if err != nil {
		return nil, err
	}
	out := retriedAll{Operations: []int64{}}
	for _, m := range models {
		if m.Retrying != 0 {
			out.Running = append(out.Running, m.Retrying)
			continue
		}
		id, err := a.operator.StartOperation(ctx, operator.OperationRequest{
			Queue: m.Queue, Verb: operator.RetryFailures, Filter: operator.Filter{All: true},
			By: a.actor(ctx, "POST /admin/dlq/retry-all"),
		})
		if err == nil {
			out.Operations = append(out.Operations, id)
			continue
		}
		p := problem(classify(ctx, err))
		aboutAll := p.Status >= http.StatusInternalServerError
		if aboutAll && len(out.Operations) == 0 {
			return nil, err
		}
		out.Errors = append(out.Errors, modelError{m.Model, p.Code, p.Detail})
		if aboutAll {
			break
		}
	}
	return answered(out, nil)
}
