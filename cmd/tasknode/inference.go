package main

import (
	"fmt"
	"log/slog"
	"strings"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/inference"
)

// service is what the section for inference comes to.
func (i Inference) service(db postgres.DB, log *slog.Logger) (c inference.ServiceConfig, err error) {
	if c.Objects, err = i.objects(); err != nil {
		return c, fmt.Errorf("tasknode.inference: %w", err)
	}
	if i.CallbackURL == "" {
		return c, nil
	}
	c.Reports, err = inference.OpenReports("tasknode.inference.callback_key", i.CallbackKey, i.CallbackURL, db, log)
	return c, err
}

func (i Inference) objects() (inference.ObjectStore, error) {
	place, isBucket := strings.CutPrefix(i.Objects, "s3://")
	switch {
	case i.Objects == "":
		return nil, nil
	case !isBucket:
		return inference.Directory(i.Objects), nil
	}
	bucket, prefix, _ := strings.Cut(place, "/")
	return inference.NewS3(inference.S3Config{
		Endpoint: i.S3Endpoint, Bucket: bucket, Prefix: prefix, Region: i.S3Region, AccessKey: i.S3AccessKey,
		SecretKey: i.S3SecretKey,
	})
}
