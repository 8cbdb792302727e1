package inference

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"net/url"
	"strings"

	"github.com/penstock/penstock/pkg/worker"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
)

// S3 is an ObjectStore in a bucket of any S3-compatible server.
type S3 struct {
	client *minio.Client
	bucket string
	prefix string
}

// S3Config says which bucket, and how to reach it.
type S3Config struct {
	Endpoint  string // https://host:port, or http:// for a server nearby
	Bucket    string // which exists
	Prefix    string // before each key
	Region    string // us-east-1 where empty, which most servers do not care about
	AccessKey string // a reference to a secret: env:NAME or file:/path
	SecretKey string // the same
}

// NewS3 returns a store. It makes no connection yet.
func NewS3(config S3Config) (*S3, error) {
	endpoint, err := url.Parse(config.Endpoint)
	if err != nil || endpoint.Host == "" || (endpoint.Scheme != "https" && endpoint.Scheme != "http") {
		return nil, fmt.Errorf("open object store: endpoint %q must be https://host or http://host", config.Endpoint)
	}
	access, err := worker.ReadSecret(config.AccessKey)
	if err != nil {
		return nil, fmt.Errorf("open object store: %w", err)
	}
	secret, err := worker.ReadSecret(config.SecretKey)
	if err != nil {
		return nil, fmt.Errorf("open object store: %w", err)
	}
	config.Region = cmp.Or(config.Region, "us-east-1")
	client, err := minio.New(endpoint.Host, &minio.Options{
		Creds: credentials.NewStaticV4(access, secret, ""), Secure: endpoint.Scheme == "https", Region: config.Region,
	})
	if err != nil {
		return nil, fmt.Errorf("open object store: %w", err)
	}
	return &S3{client: client, bucket: config.Bucket, prefix: strings.Trim(config.Prefix, "/")}, nil
}

// Put uploads the object. S3 answers once it is durable.
func (s *S3) Put(ctx context.Context, key string, data []byte) (string, error) {
	if s.prefix != "" {
		key = s.prefix + "/" + key
	}
	_, err := s.client.PutObject(ctx, s.bucket, key, bytes.NewReader(data), int64(len(data)),
		minio.PutObjectOptions{ContentType: "application/json"})
	if err != nil {
		return "", fmt.Errorf("put object %s into bucket %s: %w", key, s.bucket, err)
	}
	return (&url.URL{Scheme: "s3", Host: s.bucket, Path: key}).String(), nil
}
