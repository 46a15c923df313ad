import static java.nio.charset.StandardCharsets.UTF_8;

import java.time.Duration;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientException;
import org.apache.rocketmq.client.apis.StaticSessionCredentialsProvider;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;

/** Uses a front by TLS, which is the client's default, with credentials; each line of the output is a fact. */
public class FrontSecurity {
    static String place;

    /** Takes a place, `key:secret` of a client that may do everything, and of clients that send to two topics. */
    public static void main(String[] arguments) throws Exception {
        place = arguments[0];
        work(arguments[1]);
        for (int number = 2; number < arguments.length; number++) {
            send(arguments[number], "orders");
            send(arguments[number], "sizes");
        }
        System.exit(0);
    }

    static ClientConfiguration configuration(String credentials) {
        var parts = credentials.split(":");
        var builder = ClientConfiguration.newBuilder().setEndpoints(place);
        if (parts.length == 2) {
            builder.setCredentialProvider(new StaticSessionCredentialsProvider(parts[0], parts[1]));
        }
        return builder.build();
    }

    static Producer producer(String credentials, String topic) throws ClientException {
        return Shop.CLIENT.newProducerBuilder()
                .setClientConfiguration(configuration(credentials))
                .setTopics(topic)
                .setTransactionChecker(message -> TransactionResolution.COMMIT)
                .build();
    }

    /** Ends transactions, hears the question about the one that is left open, and receives what was committed. */
    static void work(String credentials) throws Exception {
        try (var producer = producer(credentials, "paid")) {
            for (var body : List.of("committed", "rolled back", "forgotten")) {
                var transaction = producer.beginTransaction();
                producer.send(Shop.message("paid", body), transaction);
                if (body.equals("committed")) {
                    transaction.commit();
                } else if (body.equals("rolled back")) {
                    transaction.rollback();
                }
            }
            try (var consumer = Shop.CLIENT.newSimpleConsumerBuilder()
                    .setClientConfiguration(configuration(credentials))
                    .setConsumerGroup("accounts")
                    .setAwaitDuration(Duration.ofSeconds(5))
                    .setSubscriptionExpressions(Map.of("paid", FilterExpression.SUB_ALL))
                    .build()) {
                for (int received = 0; received < 2;) {
                    for (var message : consumer.receive(32, Duration.ofMinutes(1))) {
                        System.out.println("received " + UTF_8.decode(message.getBody()));
                        consumer.ack(message);
                        received++;
                    }
                }
            }
        }
    }

    /** Sends to a topic, and says by whom, or in which words of RocketMQ the client was refused. */
    static void send(String credentials, String topic) throws Exception {
        var key = credentials.split(":")[0];
        try (var producer = producer(credentials, topic)) {
            producer.send(Shop.message(topic, key));
            System.out.println("sent to " + topic + " by " + key);
        } catch (Exception refusal) {
            Throwable cause = refusal;
            while (cause.getCause() != null) {
                cause = cause.getCause();
            }
            System.out.println(cause.getMessage().replaceAll("request-id=[^,]*, |(?<=[a-z.]) \\[.*", ""));
        }
    }
}
