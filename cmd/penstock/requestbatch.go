package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

func requestBatches(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "batches", Args: cobra.NoArgs,
		Short: "Batches of requests that clients made from files and that have not ended, oldest first",
	}
	return listing(a, c, []column[operator.RequestBatch]{
		{title: "ID", text: func(b operator.RequestBatch) string { return b.ID }},
		{title: "CLIENT", text: func(b operator.RequestBatch) string { return b.Client }},
		{title: "MODEL", text: func(b operator.RequestBatch) string { return b.Model }},
		{title: "STATUS", text: func(b operator.RequestBatch) string { return b.Status }},
		{title: "ENDED", right: true, text: func(b operator.RequestBatch) string {
			return fmt.Sprintf("%d/%d", b.Completed+b.Failed, b.Requests)
		}},
		{title: "FAILED", right: true, text: func(b operator.RequestBatch) string { return fmt.Sprint(b.Failed) }},
		{title: "PUSHED", right: true, wide: true, text: func(b operator.RequestBatch) string {
			return fmt.Sprint(b.Pushed)
		}},
		{title: "FAILED-TURNS", right: true, text: func(b operator.RequestBatch) string {
			return fmt.Sprint(b.FailedTurns)
		}},
		{title: "AGE", right: true, text: func(b operator.RequestBatch) string { return a.since(b.CreatedAt) }},
		{title: "EXPIRES", wide: true, text: func(b operator.RequestBatch) string { return stamp(&b.ExpiresAt) }},
	}, readRequestBatches)
}

func readRequestBatches(ctx context.Context, api conn, _ []string) ([]operator.RequestBatch, error) {
	return everything[operator.RequestBatch](ctx, api, "/v1/gateway/batches")
}

func requestBatchCancel(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "cancel-batch ID", Short: "End a batch of requests: lines that have not ended are cancelled",
	}
	return doing(a, c, operator.CancelRequestBatch, true,
		func(ctx context.Context, api conn, id string) (any, string, error) {
			open, err := readRequestBatches(ctx, api, nil)
			if err != nil {
				return nil, "", err
			}
			for _, b := range open {
				if b.ID == id {
					return id, fmt.Sprintf("%s of %s, %d of %d requests have ended", b.Model, b.Client,
						b.Completed+b.Failed, b.Requests), nil
				}
			}
			return nil, "", fmt.Errorf("no batch of requests %q is open: %w", id, invalidation.ErrNotFound)
		})
}
