package api

import (
	"context"
	"encoding/json"

	"github.com/penstock/penstock/pkg/operator"
)

// gatewayRoutes are the settings of online gateways: of each model's pool, and the criticalities of flows.
func (a *API) gatewayRoutes() {
	add(a, route{
		method: "GET", path: "/v1/gateway/pools", id: "list-pools",
		summary: "Pools of models by name: slots, shares reserved for online calls and for entries, and settings",
		scope:   read, of: ofPlatform,
	}, func(ctx context.Context, in *Paging) (*answer[list[operator.PoolShare]], error) {
		return paged(*in, func(after string, limit int) ([]operator.PoolShare, error) {
			return a.operator.Pools(ctx, after, limit)
		}, func(p operator.PoolShare) string { return p.Model })
	})
	change(a, route{
		method: "PUT", path: "/v1/gateway/pools/{model}", id: "set-pool",
		summary: "Replace the settings of a model's pool", scope: admin, of: ofPlatform,
	}, a.setPool)
	add(a, route{
		method: "GET", path: "/v1/gateway/batches", id: "list-request-batches",
		summary: "Batches of requests, of all clients, that have not ended, oldest first",
		scope:   read, of: ofPlatform,
	}, func(ctx context.Context, in *Paging) (*answer[list[operator.RequestBatch]], error) {
		return paged(*in, func(after operator.RequestBatchKey, limit int) ([]operator.RequestBatch, error) {
			return a.operator.RequestBatches(ctx, after, limit)
		}, func(b operator.RequestBatch) operator.RequestBatchKey {
			return operator.RequestBatchKey{CreatedAt: b.CreatedAt, ID: b.ID}
		})
	})
	verb[nameVerb](a, operator.CancelRequestBatch, route{
		path: "/v1/gateway/batches/{name}/cancel", id: "cancel-request-batch",
		summary: "End a batch of requests: lines that have not ended are cancelled",
		scope:   operate, of: ofPlatform,
	})
	add(a, route{
		method: "GET", path: "/v1/gateway/flows", id: "list-flow-criticalities",
		summary: "Flows by name that have a criticality of their own for online requests", scope: read, of: ofPlatform,
	}, func(ctx context.Context, in *Paging) (*answer[list[operator.FlowCriticality]], error) {
		return paged(*in, func(after string, limit int) ([]operator.FlowCriticality, error) {
			return a.operator.FlowCriticalities(ctx, after, limit)
		}, func(f operator.FlowCriticality) string { return f.Flow })
	})
	change(a, route{
		path: "/v1/gateway/flows", id: "set-flow-criticality",
		summary: "Set the criticality of a flow's online requests that name none, and the highest that they may name",
		scope:   admin, of: ofPlatform,
	}, func(ctx context.Context, in *struct {
		Body struct {
			ReasonBody
			Flow        string `json:"flow" minLength:"1" maxLength:"200"`
			Criticality string `json:"criticality,omitempty" enum:"critical,default,sheddable" doc:"None: no criticality of its own."`
		}
	},
	) error {
		return a.operator.SetFlowCriticality(ctx, in.Body.Flow, in.Body.Criticality, in.Body.by(ctx))
	})
}

type poolSetting struct {
	InModel
	Body struct {
		ReasonBody
		Settings map[string]any `json:"settings,omitempty" doc:"Laid over the defaults; none: the defaults alone."`
	}
}

func (a *API) setPool(ctx context.Context, in *poolSetting) error {
	var config []byte
	if in.Body.Settings != nil {
		var err error
		if config, err = json.Marshal(in.Body.Settings); err != nil {
			return err
		}
	}
	return a.operator.SetGatewayPolicy(ctx, in.Model, config, in.Body.by(ctx))
}
